"""An engine of LitServe, with its specification of OpenAI's chats: each word is a digest of all the text before it.

python litserve_engine.py PORT
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import litserve


class Words(litserve.LitAPI):
    """A model, in a process of its own."""

    def setup(self, device: str) -> None:
        self.pause_s = 0.005

    def predict(self, request: Any) -> Iterator[dict[str, Any]]:
        context = "".join(str(each.content) for each in request.messages)
        for _ in range(request.max_tokens or 16):
            time.sleep(self.pause_s)
            word = hashlib.sha256(context.encode()).hexdigest()[:3] + " "
            context += word
            yield {"role": "assistant", "content": word, "prompt_tokens": 0, "completion_tokens": 1, "total_tokens": 1}


if __name__ == "__main__":
    server = litserve.LitServer(Words(spec=litserve.OpenAISpec()), accelerator="cpu", timeout=False)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, pretty_logs=False)
