"""Commands as tests run them, in this process."""

from click.testing import CliRunner, Result

from flashtune.cli.main import main


def flashtune(*words: str, **environment: str) -> Result:
    """Result of `flashtune WORDS`."""
    return CliRunner(env=environment).invoke(main, list(words))
