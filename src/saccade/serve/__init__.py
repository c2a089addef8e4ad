"""An OpenAI-compatible server. The life of one request:

1. `app` checks key, size and draining, and `wire` the JSON: what is unknown is refused by name.
2. `call` takes slots for its answers in the `queue`, or it is told when to come again (429).
3. `reading` loads its media (`media.fetch`), decodes them in a guarded process (`media.guard`) and
   lets the processor make inputs of the conversation, all in one of `service`'s threads; of a form
   that is asked for, `formats.grammar` says which tokens may follow.
4. The `queue` hands it to its one engine thread, where `engine.scheduler` works on all
   requests at once; rounds come back as they happen, and a client that hangs up takes its rows
   with it.
5. `answer` turns rounds into text, chunks, log-probabilities and the numbers of speculation,
   and `formats.replies` gives them OpenAI's shape, calls of tools (`formats.tools`) among them.

What one request read (media, vision, prompts) is kept for later ones: `model.kept`.

A server is a `service`, made of `settings`; `errors` has the form of what is told instead.
"""
