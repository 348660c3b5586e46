"""The command ``mediator`` as the program of a Spark application: spark-submit takes programs that end in .py."""

from mediator.cli import main

if __name__ == "__main__":
    main()
