"""`python -m asyncsched.cli`."""

from asyncsched.cli import main

main()
