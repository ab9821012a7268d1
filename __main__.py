"""`python -m worldtokens` is the `worldtokens` command."""

from worldtokens.cli import main

if __name__ == "__main__":
    main()
