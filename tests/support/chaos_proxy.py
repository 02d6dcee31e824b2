"""A TCP proxy: a link between two processes, which can go down.

A process that forwards connections to its ports. It reads commands from its
standard input, and writes "ok" for each:

  stall: nothing gets through, but connections stay, as with a cable unplugged;
  drop: all connections are reset, and new ones are refused;
  up: forwards again.

It ends with its input.
"""

import os
import socket
import struct
import sys
import threading


class _Proxy:
  """Forwards one port."""

  def __init__(self, port, target, up):
    self._port, self._target, self._up = port, target, up
    self._lock = threading.Lock()
    self._open = set()
    self._listener = None
    self.listen()

  def listen(self):
    if self._listener is None:
      self._listener = socket.create_server(("localhost", self._port))
      threading.Thread(target=self._accept, args=(self._listener,),
                       daemon=True).start()

  def drop(self):
    with self._lock:
      listener, self._listener = self._listener, None
      ends, self._open = self._open, set()
    if listener:
      # This also wakes the thread that accepts.
      listener.shutdown(socket.SHUT_RDWR)
      listener.close()
    for end in ends:
      _reset(end)

  def _accept(self, listener):
    while True:
      try:
        near, _ = listener.accept()
      except OSError:
        return  # Closed.
      try:
        far = socket.create_connection(("localhost", self._target))
        for end in (near, far):
          end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
      except OSError:
        _reset(near)
        continue
      with self._lock:
        if self._listener is not listener:
          _reset(near), _reset(far)
          return
        self._open |= {near, far}
      for a, b in ((near, far), (far, near)):
        threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

  def _pump(self, source, target):
    try:
      while data := source.recv(1 << 16):
        self._up.wait()
        target.sendall(data)
    except OSError:
      pass
    self._up.wait()
    # gRPC does not use half-closed connections.
    with self._lock:
      self._open -= {source, target}
    _reset(source), _reset(target)


def _reset(end):
  """Closes a connection at once, whatever is unsent."""
  try:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.shutdown(socket.SHUT_RDWR)
  except OSError:
    pass  # It has been closed.
  end.close()


def _main(ports):
  up = threading.Event()
  up.set()
  proxies = [_Proxy(*map(int, port.split(":")), up) for port in ports]
  print("ok", flush=True)
  for command in sys.stdin:
    command = command.strip()
    if command == "stall":
      up.clear()
    elif command == "drop":
      for proxy in proxies:
        proxy.drop()
    elif command == "up":
      for proxy in proxies:
        proxy.listen()
      up.set()
    else:
      raise ValueError(command)
    print("ok", flush=True)
  os._exit(0)


if __name__ == "__main__":
  _main(sys.argv[1:])
