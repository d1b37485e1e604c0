"""`python -m edge_client` is `edge-client`."""

import sys

from edge_client.cli.main import main

sys.exit(main())
