"""The agent service: works off durable runs, one step after the other."""

import os

# Before gRPC is imported, which is the only time that it looks: its handlers around fork() make one
# child in twenty that uvloop starts die of SIGSEGV before it runs its program. No child of this
# service uses gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
