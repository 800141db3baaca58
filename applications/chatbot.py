"""A chatbot in the terminal.

USE_LADE=1 python applications/chatbot.py --chat --debug --color      # with lookahead decoding
USE_LADE=0 python applications/chatbot.py --chat --debug              # plain generate()
USE_LADE=1 python applications/chatbot.py --debug                     # one question

It talks with the bundled checkpoint, which knows little; --model_path takes any hub name or folder. `lade chat` is the
same.
"""

import sys

from lade.commands.chat import chatbot

if __name__ == "__main__":
    sys.exit(chatbot(sys.argv[1:], "chatbot.py"))
