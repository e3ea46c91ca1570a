"""Grammars that an answer must follow, over one model's vocabulary, by llguidance. No torch.

`schema`      JSON schemas: what is supported, by name and place, and made such that a small model ends
`compose`     the form asked for, tool calls and reasoning as one grammar
`vocabulary`  a tokenizer as llguidance wants it
`compiler`    grammars compiled once, cached, and checked
`runs`        digits and white space outside of JSON strings, bounded
`state`       where one sequence's output stands in its grammar, and the mask of what may come
`states`      the states of all sequences of a worker, made beside its steps
"""
