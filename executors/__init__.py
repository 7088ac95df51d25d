"""Executors: interpreters that run step programs on real devices. Nothing is here yet; this page is the interface.

The core (``asyncsched``) builds a program for each step: operations on the lanes host, h2d, compute and d2h, the
buffers that each reads and writes, and the events that it records or waits for. An executor

* runs each operation on the device's form of its lane (a CUDA stream; plain calls on a CPU) and maps each event of
  the program to the device's;
* serves what the pipeline loop yields: does host work, launches a program without blocking, and collects a launched
  step, which is the only place where the host may block. It hands back the sampled tokens, copied out of the slot,
  or the step's failure;
* reports what it measured as a timeline of the same schema as the simulator's.

It adds no ordering of its own. Where a device needs a wait, the wait is an operation in the program, so that what is
simulated and what is checked for hazards is what runs. It makes no scheduling decision, and keeps no request state
beyond the buffers that programs name.

May import the standard library, numpy, torch, transformers and ``asyncsched``; never ``sim`` or the command line.
"""
