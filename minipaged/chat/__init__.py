"""A chat in the terminal over any rung: ``python -m minipaged.chat``.

    you type            session                          engine
    "and Rome?"   ->    whole conversation as ids   ->   prefill, then one token a step
                  <-    pieces of text              <-   blocks of the pool fill up; freed when the answer ends
    "/fork 3"     ->    the same, n=3               ->   one prefill, whose blocks three continuations share
                  <-    three pieces at a time      <-   a shared last block is copied before it is written

`session` holds the conversation and knows no terminal; `answers` has what is known of an answer afterwards. `loading`
turns options into an `LLM`, beside the first prompt. `screen` shows answers and drawings, in colours or as plain
text. `repl` reads lines and runs commands; `interrupts` is Ctrl-C until then. Importing this loads nothing that would
hold up the first prompt.
"""
