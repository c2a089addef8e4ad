"""The formats of answers.

`grammar` constrains an answer to a JSON schema or a regular expression, `tool_calls` reads and
constrains calls of tools, and `responses` writes answers in OpenAI's form.
"""
