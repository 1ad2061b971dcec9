"""The command line of the chat.

Time to the first prompt, from the start of the process, with a converted model::

    script -qc "python -m minipaged.chat" /dev/null    # the prompt must be there within 2 seconds
"""

import argparse
import io
import os
import sys
from typing import TYPE_CHECKING

from minipaged.chat.interrupts import INTERRUPTED, as_usual, leave_at_once
from minipaged.cli import FAILURE, OneSentenceParser
from minipaged.errors import UserError

if TYPE_CHECKING:
    from minipaged.chat.screen import PlainScreen
    from minipaged.chat.session import ChatSession

SWITCHES = {
    "fused": "packed weights and fused kernels",
    "graphs": "decode steps recorded as CUDA graphs",
    "device_batch": "block tables and sampling that stay on the GPU",
    "overlap": "planning a step while the one before it runs",
}
"""The steps of speed that can be switched off, by the name of the option of `minipaged.LLM`."""


def make_parser() -> OneSentenceParser:
    """Return the parser of the chat's options."""
    parser = OneSentenceParser(
        prog="python -m minipaged.chat",
        description="Chat with a model over a paged KV cache. With --prompt, or text on standard input, answer once.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", default="smollm2", help="smollm2 (the default), a local folder, or a Hugging Face hub id")
    add("--revision", help="branch, tag or commit of a hub model")
    add("--rung", help="rung of the ladder, from foundation up (default: the highest)")
    add("--tier", choices=["torch", "triton"], help="implementation of the operations (default: the device's)")
    add("--device", help="cpu, cuda or cuda:1 (default: cuda where there is one)")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16 where the device has it")
    add("--block-size", type=int, default=16, metavar="S", help="slots in a block (default: 16)")
    add("--num-blocks", type=int, metavar="N", help="blocks of the cache (default: one conversation of full length)")
    add("--max-model-len", type=int, metavar="L", help="most tokens of a conversation (default: the model's limit)")
    for name, what in SWITCHES.items():
        add(f"--no-{name.replace('_', '-')}", dest=name, action="store_const", const=False, help=f"without {what}")
    add("--enforce-eager", action="store_true", help="another name of --no-graphs")
    add("--temperature", type=float, metavar="T", help="0 takes the best token (default: the model's own, else 0)")
    add("--top-p", type=float, metavar="P", help="keep the best tokens of this total probability")
    add("--seed", type=int, help="makes sampling repeatable")
    add("--max-tokens", type=int, metavar="N", help="most tokens of an answer (default: what the context has left)")
    add("--system", metavar="TEXT", help="system message")
    add("--prompt", metavar="TEXT", help="answer this and exit")
    add("--fork", type=int, metavar="N", help="with --prompt: N answers at once, and the blocks that they share")
    add("--show-blocks", action="store_true", help="draw the cache, live while it fills")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the chat and return the exit code: 0, 2 after an error (one sentence on stderr), 130 after Ctrl-C."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started the chat
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    options = make_parser().parse_args(argv)
    leave_at_once()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a notebook has in its place can write everything
            stream.reconfigure(errors="replace")  # a console may lack an answer's characters
    try:
        if options.prompt is None and sys.stdin is not None and sys.stdin.isatty():
            if options.fork is not None:
                raise UserError("--fork answers once, so it needs --prompt; in the chat it is the command /fork")
            _chat(options)
            return 0
        return _answer_once(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        return FAILURE
    except (UserError, OSError, MemoryError, RuntimeError, ImportError) as error:
        from minipaged.chat.repl import one_sentence

        print(f"error: {one_sentence(error)}", file=sys.stderr)
        return FAILURE
    finally:
        as_usual()


def _answer_once(options: argparse.Namespace) -> int:
    from minipaged.chat.loading import load_session
    from minipaged.chat.screen import make_screen

    text = options.prompt
    if text is None:
        text = sys.stdin.buffer.read().decode("utf-8", "replace").rstrip("\r\n") if sys.stdin is not None else ""
    if not text.strip():
        raise UserError("there is nothing to answer: the prompt is empty")
    session, screen = load_session(options), make_screen()
    as_usual()
    return show(session, screen, text, options)


def show(session: "ChatSession", screen: "PlainScreen", text: str, options: argparse.Namespace) -> int:
    """Answer one message, or fork it as the options say; return the exit code. An error comes through."""
    if options.fork is None:
        screen.show_answer(session, text, options.show_blocks)
    else:
        screen.show_fork(session, options.fork, text)
    return INTERRUPTED if any(answer.finish_reason == "abort" for answer in session.answers) else 0


def _chat(options: argparse.Namespace) -> None:
    from minipaged.chat.loading import Loading, is_at_hand
    from minipaged.chat.repl import run

    needs_no_download = is_at_hand(options.model)
    loading = Loading(options)
    loading.start()
    code = INTERRUPTED
    try:
        run(options, loading, needs_no_download)
        code = 0
    finally:
        if loading.is_alive():
            # Left before the model was there. Python's own exit would trip over the thread that still loads.
            sys.stdout.flush()
            os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
