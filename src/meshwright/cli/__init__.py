"""One file per command. A command imports the rooms it needs when it runs, so that `meshwright --help` starts at
once."""
