"""LiteLLM's client, in an environment of its own (make soak).

python litellm_client.py URL TOKEN_FILE CA_FILE MODEL    prints a whole answer and the same one as a stream, as JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import litellm  # type: ignore[import-not-found]


def main(url: str, token: str, trusted: str, model: str) -> None:
    litellm.ssl_verify = trusted
    asked: dict[str, Any] = {
        "model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": Path(token).read_text().strip(),
        "messages": [{"role": "user", "content": "hello"}], "max_tokens": 40, "temperature": 0,
    }  # fmt: skip
    whole = litellm.completion(**asked).choices[0].message.content
    parts = litellm.completion(**asked, stream=True)
    json.dump([whole, "".join(part.choices[0].delta.content or "" for part in parts)], sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
