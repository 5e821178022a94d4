"""One script in several processes, watched from outside: `autopar launch -n 4 script.py`, and `join` for the script itself."""

from autopar.launch.join import join as join
