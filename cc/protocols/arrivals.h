// The values that workers send to a server of averaging rounds, until they are
// part of a round. Its caller holds a lock.
//
// A worker sends its values in parts while it has a turn. The server that
// orders the rounds gives turns, to a limited number of workers at a time.
// Other servers are told which turns are alive. So a server holds the values
// of that number of workers, however many there are.
#ifndef WRAPOPT_CC_PROTOCOLS_ARRIVALS_H_
#define WRAPOPT_CC_PROTOCOLS_ARRIVALS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace wrapopt {

// Turns are numbered. A turn is over if it is not alive and is not newer than
// the newest one.
struct Turns {
  int64_t newest = -1;
  std::set<int64_t> alive;

  bool is_over(int64_t turn) const {
    return turn <= newest && alive.count(turn) == 0;
  }
};

// Where a worker's values belong. A server that loses its center begins a new
// generation, in which the rounds may go on from an earlier one.
struct Place {
  int64_t round = -1;
  int64_t generation = 0;

  friend bool operator==(const Place& a, const Place& b) {
    return a.round == b.round && a.generation == b.generation;
  }
  friend bool operator!=(const Place& a, const Place& b) { return !(a == b); }
};

// The leading server's knowledge of a round, which workers carry to the other
// servers.
struct Known {
  Place place;
  bool closed = false;
  int64_t turn = -1;  // Of the worker that was told, or -1.
  Turns turns;        // `newest` is -1 if they are not told.
  std::vector<std::string> workers;  // Members of the round, or all of them.
  std::vector<std::string> without_values;  // Some of these.
};

template <class Value>
class Arrivals {
 public:
  // The values of a worker.
  struct Staged {
    Place place;
    int64_t turn = -1;
    double weight = 1;
    std::vector<Value> values;
    std::vector<bool> has_come;

    bool is_complete() const {
      return std::all_of(has_come.begin(), has_come.end(),
                         [](bool come) { return come; });
    }
  };

  // Adds parts [first, first + parts.size()) of `count`. The first part of
  // another turn or place drops what the worker sent before, to `dropped`.
  void Add(const std::string& worker, const Place& place, int64_t turn,
           double weight, size_t count, size_t first, std::vector<Value> parts,
           std::vector<std::vector<Value>>* dropped) {
    Staged& staged = staged_[worker];
    if (staged.place != place || staged.turn != turn ||
        staged.weight != weight || staged.values.size() != count) {
      dropped->push_back(std::move(staged.values));
      staged = {place, turn, weight, std::vector<Value>(count),
                std::vector<bool>(count, false)};
    }
    for (size_t i = 0; i < parts.size(); ++i) {
      staged.values[first + i] = std::move(parts[i]);
      staged.has_come[first + i] = true;
    }
  }

  // nullptr if the worker has sent nothing.
  const Staged* Find(const std::string& worker) const {
    const auto found = staged_.find(worker);
    return found == staged_.end() ? nullptr : &found->second;
  }

  Staged Take(const std::string& worker) {
    const auto found = staged_.find(worker);
    Staged staged = std::move(found->second);
    staged_.erase(found);
    return staged;
  }

  // Drops the values of turns that are over, but not those of a later
  // generation, which belong to no turn of this one.
  void DropOver(const Turns& turns, int64_t generation,
                std::vector<std::vector<Value>>* dropped) {
    for (auto i = staged_.begin(); i != staged_.end();) {
      const auto here = i++;
      const Staged& staged = here->second;
      if (staged.place.generation <= generation && turns.is_over(staged.turn)) {
        dropped->push_back(std::move(here->second.values));
        staged_.erase(here);
      }
    }
  }

  void DropAll(std::vector<std::vector<Value>>* dropped) {
    for (auto& [worker, staged] : staged_) {
      dropped->push_back(std::move(staged.values));
    }
    staged_.clear();
  }

  size_t size() const { return staged_.size(); }

 private:
  std::map<std::string, Staged> staged_;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_PROTOCOLS_ARRIVALS_H_
