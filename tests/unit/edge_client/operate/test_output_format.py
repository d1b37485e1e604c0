"""The option `--format`, spelled alike in all commands."""

from __future__ import annotations

import argparse

import pytest

from edge_client.operate.output_format import add_format


@pytest.mark.parametrize(
    ("typed", "chosen"),
    [([], "table"), (["text"], "table"), (["table"], "table"), (["csv"], "csv"), (["json"], "json")],
)
def test_text_is_another_word_for_table(typed: list[str], chosen: str) -> None:
    """What people typed so far goes on to work; the help shows one of the two."""
    parser = add_format(argparse.ArgumentParser(), "csv")
    assert parser.parse_args([word for value in typed for word in ("--format", value)]).format == chosen
    assert "{table,csv,json}" in parser.format_help()


def test_another_format_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With those that there are."""
    with pytest.raises(SystemExit):
        add_format(argparse.ArgumentParser()).parse_args(["--format", "xml"])
    assert "invalid choice: 'xml' (choose from" in capsys.readouterr().err
