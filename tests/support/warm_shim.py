"""What a launcher starts in a rank's place: python -IS warm_shim.py SOCKET argv (see warm.py)."""

import array
import contextlib
import json
import os
import signal
import socket
import sys

FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


def exactly(connection: socket.socket, num: int) -> bytes:
    data = b""
    while len(data) < num:
        piece = connection.recv(num - len(data))
        if not piece:
            os._exit(1)  # the server is gone, and the rank with it
        data += piece
    return data


def pass_on(number, _):
    with contextlib.suppress(OSError):  # the rank has just ended, as the server will report
        server.send(bytes([number]))


server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
words = {
    "argv": sys.argv[2:],
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "cores": sorted(os.sched_getaffinity(0)),
}
told = json.dumps(words).encode()
files = array.array("i", [0, 1, 2]).tobytes()
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
server.sendmsg([len(told).to_bytes(8, "little")], rights)
server.sendall(told)
pid = int.from_bytes(exactly(server, 4), "little")
with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name_of_this_process:
    name_of_this_process.write(str(pid))  # tests find the rank by it
for name in FORWARDED:
    signal.signal(getattr(signal, name), pass_on)
code = os.waitstatus_to_exitcode(int.from_bytes(exactly(server, 4), "little"))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
