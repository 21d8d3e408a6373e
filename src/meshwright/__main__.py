"""`python -m meshwright` is `meshwright`."""

from meshwright.cli.main import main

raise SystemExit(main())
