"""What a release may claim (`claims`) and how it says so (`card`); the command is `release`."""
