"""``python -m slurmft``."""

import sys

if __name__ == "__main__":
    begun = None
    if sys.argv[1:2] == ["agent"]:  # before anything else is imported, as that takes longer than all that follows
        from slurmft.ipc.zygote_start import begun as begun_zygote

        begun = begun_zygote()
    from slurmft.cli.main import main

    main(begun)
