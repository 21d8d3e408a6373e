"""Contains one file per command. A command imports the packages that it needs when it runs, so that `meshwright
--help` starts fast."""
