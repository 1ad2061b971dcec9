"""The interactive chat: read a line, run a command or answer it, and again."""

import argparse
import asyncio
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from minipaged.chat.interrupts import as_usual, cleaning_up
from minipaged.chat.loading import Loading, load_llm, without_cache_options
from minipaged.errors import UserError

if TYPE_CHECKING:
    from minipaged.chat.screen import PlainScreen
    from minipaged.chat.session import ChatSession

PROMPT = ">>> "


class Repl:
    """Runs lines against a session and a screen; where the lines come from is the caller's affair.

    A command is a method whose name begins with ``do_``; the first line of its docstring is its help.
    """

    def __init__(self, options: argparse.Namespace, session: "ChatSession", screen: "PlainScreen"):
        self.options = options
        self.session = session
        self.screen = screen
        self.has_picture: bool = options.show_blocks

    def run_line(self, line: str) -> bool:
        """Run one line; return False when the chat is to end. What goes wrong is said in one sentence."""
        try:
            if line.startswith("/"):
                return self._run_command(line)
            if line.strip():
                self.screen.show_answer(self.session, line, self.has_picture)
        except (UserError, OSError, MemoryError, RuntimeError) as error:  # the conversation goes on
            self.screen.note(one_sentence(error))
        except KeyboardInterrupt:
            self.screen.note("\nstopped")
        return True

    def _run_command(self, line: str) -> bool:
        name, _, argument = line[1:].partition(" ")
        command: Callable[[str], bool | None] | None = getattr(self, f"do_{name}", None)
        if command is None:
            self.screen.note(
                f"There is no command /{name}; /help lists them, and a space in front sends the line as a message."
            )
            return True
        return command(argument.strip()) is not False

    def do_help(self, argument: str) -> None:
        """/help: this list."""
        for command in _commands():
            self.screen.note("  " + (command.__doc__ or ""))
        self.screen.note("  Ctrl-C stops an answer, Ctrl-D leaves; Alt-Enter begins a new line in a message.")

    def do_reset(self, argument: str) -> None:
        """/reset: forget the conversation, keep the system message."""
        self.session.reset()
        self.screen.note("The conversation begins anew.")

    def do_system(self, argument: str) -> None:
        """/system [TEXT | none]: show, set or remove the system message."""
        if argument:
            self.session.set_system(None if argument == "none" else argument)
        system = self.session.system
        self.screen.note("There is no system message." if system is None else f"system: {system}")

    def do_stats(self, argument: str) -> None:
        """/stats: the engine's counters and the conversation's size."""
        session, llm = self.session, self.session.llm
        self.screen.note(
            f"{self.options.model} on rung {llm.rung}, {llm.device}, {str(llm.dtype).removeprefix('torch.')}"
        )
        num_turns = sum(message["role"] == "user" for message in session.messages)
        num_tokens = session.answer.num_prompt_tokens + session.answer.num_tokens if session.answer else 0
        self.screen.note(f"conversation: {num_turns} turns, {num_tokens} of {llm.max_model_len} tokens")
        self.screen.note(", ".join(f"{name} {value}" for name, value in llm.stats().items()))

    def do_fork(self, argument: str) -> None:
        """/fork N [TEXT]: N answers at once that share the prompt's blocks; no TEXT: to the last message, anew."""
        number, *text = argument.split(maxsplit=1) or [""]
        if not number.isdecimal():
            raise UserError("/fork needs a number of continuations, such as /fork 3 or /fork 3 Tell me a story")
        self.screen.show_fork(self.session, int(number), text[0] if text else None)
        self.screen.note("Continuation 0 is in the conversation; /keep K puts another in its place.")

    def do_keep(self, argument: str) -> None:
        """/keep K: have the conversation go on from continuation K of the last /fork; without it, from 0."""
        if not argument.isdecimal():
            raise UserError("/keep needs the number of a continuation, such as /keep 1")
        self.session.keep(int(argument))
        self.screen.note(f"Continuation {int(argument)} is in the conversation.")

    def do_blocks(self, argument: str) -> None:
        """/blocks [on | off]: draw the blocks of the last answer, or draw them live while answers come."""
        if argument in ("on", "off"):
            self.has_picture = argument == "on"
            self.screen.note(f"Blocks are {'drawn' if self.has_picture else 'not drawn'} while answers come.")
        elif argument:
            raise UserError(f"/blocks takes on, off or nothing, not {argument!r}")
        elif self.session.memory is None:
            has_cache = hasattr(self.session.llm.engine, "cache")
            nothing = "no answer has used the cache yet" if has_cache else "this rung has no cache"
            self.screen.note(f"There is nothing to draw: {nothing}.")
        else:
            is_fork = len(self.session.memory.seq_ids) > 1
            name = (
                "fork, while all continuations were in it"
                if is_fork
                else "answer, just before its slots were given back"
            )
            self.screen.note(f"The cache at the end of the last {name}:")
            self.screen.draw(self.session.memory)
            num_cached = self.session.llm.stats()["cached_blocks"]
            if num_cached:
                self.screen.note(f"{num_cached} blocks are cached now, for a later prompt that begins in the same way.")

    def do_rung(self, argument: str) -> None:
        """/rung [NAME]: show the rungs of the ladder, or change to one and keep the conversation."""
        from minipaged.llm import RUNGS

        if argument:
            has_cache = argument != "foundation"
            options = self.options if has_cache else without_cache_options(self.options)
            self.session.llm = load_llm(options, argument)
            self.session.memory = None
        for number, rung in enumerate(RUNGS):
            title = (import_module(f"minipaged.{rung}").__doc__ or "").splitlines()[0]
            idea = title.split(": ", 1)[-1].split(". ")[0].split(" (")[0].rstrip(".")
            self.screen.note(f"{'*' if rung == self.session.llm.rung else ' '} {number} {rung:11} {idea}")

    def do_save(self, argument: str) -> None:
        """/save FILE: write the conversation, as JSON if the name ends in .json, else as Markdown."""
        if not argument:
            raise UserError("/save needs a file name, such as talk.md or talk.json")
        self.session.save(Path(argument), self.options.model)
        self.screen.note(f"The conversation is in {argument}.")

    def do_exit(self, argument: str) -> bool:
        """/exit: leave."""
        return False


def _commands() -> list[Callable[..., object]]:
    return [method for name, method in vars(Repl).items() if name.startswith("do_")]


def one_sentence(error: BaseException) -> str:
    """Return an error as one line."""
    return " ".join(str(error).split()) or type(error).__name__


def run(options: argparse.Namespace, loading: Loading, is_at_hand: bool) -> None:
    """Chat until the user leaves. The first prompt does not wait for a model that needs no download."""
    read_line = _terminal_reader(loading) if is_at_hand else None
    if read_line is None:
        with cleaning_up():
            loading.wait()
        read_line = _terminal_reader(loading) or _plain_reader
    as_usual()
    print(f"minipaged chat with {options.model}. /help lists the commands, Ctrl-D leaves.")
    repl = None
    while True:
        try:
            line = read_line()
            repl = repl or _begin(options, loading)
            if not repl.run_line(line):
                return
        except EOFError:
            return
        except KeyboardInterrupt:  # at the prompt, or just as an answer had ended by itself
            print("Ctrl-D leaves.")


def _begin(options: argparse.Namespace, loading: Loading) -> Repl:
    from minipaged.chat.screen import make_screen

    return Repl(options, loading.wait(), make_screen())


def _terminal_reader(loading: Loading) -> Callable[[], str] | None:
    """Return a function that reads a line at a prompt with history and editing; None without prompt_toolkit."""
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.key_binding import KeyBindings
    except ImportError:
        return None
    # The prompt needs no cursor position; asking for it makes terminals that do not answer show a warning.
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    prompt: PromptSession[str] = PromptSession(PROMPT, key_bindings=keys, prompt_continuation="... ")

    def leave_if_loading_fails() -> None:
        async def watch() -> None:
            while loading.is_alive():
                await asyncio.sleep(0.05)
            if loading.error is not None:
                prompt.app.exit(exception=loading.error)

        prompt.app.create_background_task(watch())

    return lambda: prompt.prompt(pre_run=leave_if_loading_fails)


def _plain_reader() -> str:
    try:
        return input(PROMPT)
    except EOFError:
        print()  # Ctrl-D leaves the cursor behind the prompt
        raise
