"""A script that speaks hf_worker's protocol without any framework: its answer to a prompt counts up from its adapter.

The first argument says how it behaves: "good"; "missing" has no torch; "dies" ends at the first run, with words.
"""

import json
import sys

for line in sys.stdin:
    message = json.loads(line)
    if message["cmd"] == "load":
        if sys.argv[1] == "missing":
            answer = {"error": "No module named 'torch'", "kind": "ModuleNotFoundError"}
        else:
            answer = {"versions": {"fake": "1.0"}, "threads": message["threads"]}
    elif sys.argv[1] == "dies":
        sys.exit("out of memory")
    elif message["max_tokens"] > 8:
        answer = {"error": "too long", "kind": "ValueError"}
    else:
        first = [10 * (-1 if number is None else number) + 10 for number in message["adapters"]]
        tokens = [[start + i for i in range(message["max_tokens"])] for start in first]
        answer = {"seconds": 2.0 if message["method"] == "mixed" else 4.0, "tokens": tokens}
    print(json.dumps(answer), flush=True)
