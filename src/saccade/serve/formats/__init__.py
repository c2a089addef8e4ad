"""The formats of answers.

`grammar` constrains an answer to a JSON schema or a regular expression, `tool_calls` reads and
constrains calls of tools, `reasoning` separates a thinking model's reasoning, `chat_forms` writes
completions in OpenAI's form, and `response_items` the items of its Responses API.
"""
