"""Exit status 0 when a server on this machine answers /health with 200; for images that have no curl.

An address may be given: `healthcheck.py http://127.0.0.1:8000/ready`.
"""

import sys
import urllib.request


def main() -> int:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/health"
    # Not through a proxy that the environment may name: the server is here.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=4) as response:
            return int(response.status != 200)
    except (OSError, ValueError) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
