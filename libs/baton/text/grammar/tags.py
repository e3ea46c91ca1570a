"""Texts around tool calls and reasoning that grammars spell out, special tokens though some may be.

The same wherever a grammar is compiled, so that it means the same at the tokenizer and at every worker.
"""

TAGS = (
    "<think>",
    "</think>",
    "<thinking>",
    "</thinking>",
    "[THINK]",
    "[/THINK]",
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
)
