"""The simulated engine: a latency model behind the engine port, for load, fault and scale tests.

Its answers mean nothing and are labelled as simulated; only explicit configuration chooses it.
Where to look: ``engine`` (the port), ``batch`` (the step loop), ``model`` (the next token),
``faults`` (scripted faults), ``profile`` (size and speed), ``structured`` (constrained output).
"""
