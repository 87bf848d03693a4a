"""``python3 -I -S -B /turnstile/helper``: this folder is then on the path; the package below is all of it."""

import sys

from turnstile_helper.main import main  # type: ignore[import-not-found, unused-ignore]

sys.exit(main())
