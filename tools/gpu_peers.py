"""Measures PyTorch's times for the steps of `cc/gpu/check/bandwidth`.

Its averages and its fused Adam are launches of their own; an average after the
step reads the variable once more.
"""

import statistics

import torch


def resnet50():
  """The sizes of cc/gpu/check/measure.cc."""
  sizes, width_in = [7 * 7 * 3 * 64, 64, 64], 64
  for blocks, width in (3, 64), (4, 128), (6, 256), (3, 512):
    for block in range(blocks):
      convolutions = [(1, width_in, width), (3, width, width),
                      (1, width, 4 * width)]
      if block == 0:
        convolutions.append((1, width_in, 4 * width))
      for k, i, o in convolutions:
        sizes += [k * k * i * o, o, o]
      width_in = 4 * width
  return sizes + [2048 * 1000, 1000]


def seconds(work):
  begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
  times = []
  for turn in range(23):
    begin.record()
    work()
    end.record()
    end.synchronize()
    if turn >= 3:
      times.append(begin.elapsed_time(end) / 1000)
  return statistics.median(times)


def compare(dtype, name, sizes):
  variables, averages = ([torch.zeros(n, dtype=dtype, device="cuda")
                          for n in sizes] for _ in range(2))
  for variable in variables:
    variable.grad = torch.zeros_like(variable)
  ema = lambda: torch._foreach_lerp_(averages, variables, 0.1)
  adam = torch.optim.Adam(variables, fused=True)

  def both():
    adam.step()
    ema()

  for what, work in ("EMA", ema), ("Adam", adam.step), ("Adam, EMA", both):
    print(f"{what:16s} {name:12s} {str(dtype)[6:]:8s} "
          f"{seconds(work) * 1e3:9.4f} ms", flush=True)


def main():
  print(torch.cuda.get_device_name(), "PyTorch", torch.__version__)
  for dtype in torch.float32, torch.bfloat16, torch.float16, torch.float64:
    compare(dtype, "one of 1 GiB", [2**30 // (torch.finfo(dtype).bits // 8)])
    compare(dtype, "ResNet-50", resnet50())


if __name__ == "__main__":
  main()
