"""A verb in this process, for speed: what ``main()`` would print and exit with."""

from click.testing import CliRunner

from slurmft.cli.main import cli
from slurmft.errors import SlurmftError


def slurmft(*words: object, **environment: str) -> tuple[int, str]:
    """Exit code, and what was printed or, of an error, said."""
    result = CliRunner(env=environment).invoke(cli, [*map(str, words)], standalone_mode=False)
    if isinstance(result.exception, SlurmftError):
        return result.exception.exit_code, str(result.exception)
    if isinstance(result.exception, OSError):
        return 1, str(result.exception)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.return_value or 0, result.output
