"""`python -m common.accelerator <command>`."""

from .commands.accelerate_cli import main

raise SystemExit(main())
