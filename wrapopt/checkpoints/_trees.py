"""Reads and copies the structure of HDF5 files.

HDF5 calls a name in a group a link. Several hard links may lead to one object,
and a soft link holds the path of another link. Links to objects of other files
are refused.
"""

import typing

import h5py
import numpy as np


class Tree(typing.NamedTuple):
  """The objects of an HDF5 file, by name. Parents come before children.

  Attributes:
    root: The root group.
    groups: {name: group}, without the root.
    datasets: {name: dataset} of the arrays, with scalars.
    others: {name: object}: datasets without elements, and named types.
    hard_links: {name: name of the same object in the attributes above, or
      "/"}.
    soft_links: {name: path}.
  """
  root: h5py.Group
  groups: dict[str, h5py.Group]
  datasets: dict[str, h5py.Dataset]
  others: dict[str, typing.Any]
  hard_links: dict[str, str]
  soft_links: dict[str, str]


def tree_of(file):
  """The Tree of an open HDF5 file.

  Args:
    file: An `h5py.File`.

  Returns:
    A Tree.

  Raises:
    ValueError: If a link leads to another file.
  """
  tree = Tree(file["/"], {}, {}, {}, {}, {})
  _visit(tree, tree.root, "", {_address(tree.root): "/"})
  return tree


def _visit(tree, group, prefix, names):
  """Adds the links of a group to a Tree; `names` are {address: name}."""
  for key in group:
    name = prefix + key
    link = group.get(key, getlink=True)
    if isinstance(link, h5py.ExternalLink):
      raise ValueError(
          f"{group.file.filename} must contain its variables, got the link "
          f"'{name}' to the file {link.filename}. Replace the link by a copy "
          "of the data.")
    if isinstance(link, h5py.SoftLink):
      tree.soft_links[name] = link.path
      continue
    item = group[key]
    known = names.setdefault(_address(item), name)
    if known != name:
      tree.hard_links[name] = known
    elif isinstance(item, h5py.Group):
      tree.groups[name] = item
      _visit(tree, item, name + "/", names)
    elif isinstance(item, h5py.Dataset) and item.shape is not None:
      tree.datasets[name] = item
    else:
      tree.others[name] = item


def _address(item):
  return h5py.h5o.get_info(item.id).addr


def libver_of(tree):
  """The `libver` of an `h5py.File` that holds what the file of a Tree holds.

  Only newer formats hold attributes of more than 64 kilobytes.
  """
  superblock, *_ = tree.root.file.id.get_create_plist().get_version()
  return "latest" if superblock >= 2 else None


def copy_structure(tree, to):
  """Copies all but arrays and hard links: groups, their attributes, the rest.

  Args:
    tree: A Tree.
    to: An `h5py.File`, which may have some of the groups.

  Raises:
    ValueError: If an object has references to others.
  """
  copy_attributes(tree.root, to["/"])
  for name, group in tree.groups.items():
    copy_attributes(group, to.require_group(name))
  for name, path in tree.soft_links.items():
    to[name] = h5py.SoftLink(path)
  for name, item in tree.others.items():
    copy_object(item, to, name)


def copy_hard_links(tree, to):
  """Copies hard links, once their objects are there."""
  for name, of in tree.hard_links.items():
    to[name] = to[of]


def copy_object(item, to, name):
  """Copies a dataset or a named type, of any type, with its attributes."""
  _check_type(item, item.id if isinstance(item, h5py.Datatype) else
              item.id.get_type())
  for attribute in item.attrs:
    _check_type(item, item.attrs.get_id(attribute).get_type())
  to.copy(item, to, name)


def copy_attributes(item, to, without=None):
  """Copies attributes that are not there yet.

  Args:
    item: An object with attributes.
    to: Another one.
    without: The name of an attribute that is not copied, or None.
  """
  for name in item.attrs:
    if name == without or name in to.attrs:
      continue
    attribute = item.attrs.get_id(name)
    _check_type(item, attribute.get_type())
    copy = h5py.h5a.create(to.id, name.encode("utf-8", "surrogateescape"),
                           attribute.get_type().copy(), attribute.get_space())
    if attribute.shape is not None:
      value = np.empty(attribute.shape, attribute.dtype)
      attribute.read(value)
      copy.write(value)


def _check_type(item, datatype):
  # A copied reference would lead to nothing, or to another object.
  if datatype.detect_class(h5py.h5t.REFERENCE):
    raise ValueError(
        f"{item.file.filename} must not contain HDF5 references, which a copy "
        f"cannot keep, got one in '{item.name}'. Save the variables without "
        "references.")
