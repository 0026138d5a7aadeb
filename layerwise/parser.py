"""Parser: argparse, with the flags that matter in --help and all of them in --help-all."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from layerwise.errors import LayerwiseError, nearest

ALWAYS = {"--help", "--help-all"}


class Parser(argparse.ArgumentParser):
    """argparse, with errors in layerwise's form, the nearest names, one line of usage, and epilogs as they are.

    main: the flags that --help shows, separated by blanks; --help-all shows the others, too. "": --help shows all.
    """

    def __init__(self, *args: Any, main: str = "", **options: Any) -> None:
        if "epilog" in options:
            options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        options["allow_abbrev"] = False  # a flag that is gone is not another's beginning
        super().__init__(*args, **options)
        self.main_flags = set(main.split())
        if main:
            self.add_argument("--help-all", action=_HelpAll, help="show all options and exit")

    def error(self, message: str) -> NoReturn:
        raise LayerwiseError(f"{message}{self._nearest(message)} (see {self.prog} --help)")

    def _nearest(self, message: str) -> str:
        """Returns the option, or the choice of one, that an error's word is nearest to."""
        if option := re.match(r"unrecognized arguments: (--[^\s=]+)", message):
            return nearest(option[1], self._option_string_actions)
        if choice := re.match(r"argument .*(--[\w-]+): invalid choice: '([^']*)'", message):
            return nearest(choice[2], map(str, self._option_string_actions[choice[1]].choices or ()))
        return ""

    def full_help(self) -> str:
        """Returns the help with all flags."""
        if self.usage is None and len(self._actions) > 8:
            names = [str(action.metavar or action.dest) for action in self._get_positional_actions()]
            self.usage = " ".join(["%(prog)s", *names, "[options]"])
        return super().format_help()

    def format_help(self) -> str:
        """Returns the help with the main flags."""
        if not self.main_flags:
            return self.full_help()
        shown = self.main_flags | ALWAYS
        hidden = {action: action.help for action in self._actions if action.option_strings}
        hidden = {action: text for action, text in hidden.items() if not shown & {*action.option_strings}}
        try:
            for action in hidden:
                action.help = argparse.SUPPRESS
            return self.full_help()
        finally:
            for action, text in hidden.items():
                action.help = text


class _HelpAll(argparse.Action):
    """Prints the help with all flags, and exits."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, Parser)
        print(parser.full_help(), end="")
        parser.exit()
