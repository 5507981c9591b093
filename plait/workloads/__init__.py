"""What the command line runs: models of `plait.models`, or a user's own `package.module:build`."""
