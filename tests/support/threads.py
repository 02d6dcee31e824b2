"""Runs functions concurrently."""

import threading


def in_threads(*bodies):
  """Runs functions at once. Asserts that all end, and that none raises."""
  errors = []

  def guarded(body):
    try:
      body()
    except BaseException as e:  # pylint: disable=broad-exception-caught
      errors.append(e)

  threads = [threading.Thread(target=guarded, args=[body], daemon=True)
             for body in bodies]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  if errors:
    raise errors[0]
  assert not any(thread.is_alive() for thread in threads), "deadlock"
