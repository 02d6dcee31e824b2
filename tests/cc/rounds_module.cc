// For tests: the averaging rounds in Python, with a timer that is called by
// hand. A value is any object of Python. All calls hold the interpreter's lock.
#include <pybind11/pybind11.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cc/protocols/rounds.h"

namespace wrapopt {
namespace {

namespace py = pybind11;

using PyRounds = Rounds<py::object>;

// Its time is what the test says.
class TestTimer : public Timer {
 public:
  Id Set(double seconds, std::function<void()> ring) override {
    const Id id = next_++;
    times_[id] = now_ + seconds;
    rings_[{now_ + seconds, id}] = std::move(ring);
    return id;
  }

  void Cancel(Id id) override {
    const auto found = times_.find(id);
    if (found == times_.end()) return;
    rings_.erase({found->second, id});
    times_.erase(found);
  }

  void set_now(double now) { now_ = now; }

  // The time of the first ring; infinite without any.
  double Next() const {
    return rings_.empty() ? kForever : rings_.begin()->first.first;
  }

  // Rings all that is due.
  void RingDue() {
    while (Next() <= now_) {
      const auto first = rings_.begin();
      const std::function<void()> ring = std::move(first->second);
      times_.erase(first->first.second);
      rings_.erase(first);
      ring();
    }
  }

 private:
  double now_ = 0;
  Id next_ = 0;
  std::map<Id, double> times_;
  std::map<std::pair<double, Id>, std::function<void()>> rings_;
};

void Check(const RoundsStatus& status) {
  if (status.ok()) return;
  // (code, message); the codes are TensorFlow's.
  const py::object error = py::module_::import("builtins").attr("Exception")(
      static_cast<int>(status.code), status.message);
  PyErr_SetObject(PyExc_Exception, error.ptr());
  throw py::error_already_set();
}

// The rounds of one server, and its timer.
class Server {
 public:
  Server(const std::string& name, int64_t num_workers)
      : rounds_(std::make_shared<PyRounds>(name, num_workers, &timer_,
                                           [](const std::string&) {})) {}

  TestTimer* timer() { return &timer_; }
  PyRounds* rounds() { return rounds_.get(); }

  // Calls done(code, message, known) at its end. Returns a function that ends
  // the step of the wait.
  std::function<void()> Start(RoundWait wait, py::function done) {
    const auto ended = std::make_shared<std::function<void()>>();
    wait.watch = [ended](std::function<void()> call) {
      *ended = std::move(call);
      return true;
    };
    wait.unwatch = [ended] { *ended = nullptr; };
    wait.done = [done = std::move(done)](const RoundAnswer& answer) {
      done(static_cast<int>(answer.status.code), answer.status.message,
           answer.known);
    };
    rounds_->Start(std::move(wait));
    return [ended] {
      const auto call = *ended;
      if (call) call();
    };
  }

 private:
  TestTimer timer_;  // Outlives the rounds.
  std::shared_ptr<PyRounds> rounds_;
};

PYBIND11_MODULE(_rounds, m) {
  py::class_<Place>(m, "Place")
      .def(py::init([](int64_t round, int64_t generation) {
        return Place{round, generation};
      }))
      .def_property_readonly("pair", [](const Place& place) {
        return std::make_pair(place.round, place.generation);
      });

  // As the kernels read and write it: "round generation closed turn newest
  // alive...", and names.
  py::class_<Known>(m, "Known")
      .def(py::init([](const std::vector<int64_t>& numbers,
                       std::vector<std::string> workers) {
        Known known;
        known.place = {numbers.at(0), numbers.at(1)};
        known.closed = numbers.at(2) != 0;
        known.turn = numbers.at(3);
        known.turns.newest = numbers.at(4);
        known.turns.alive = {numbers.begin() + 5, numbers.end()};
        known.workers = std::move(workers);
        return known;
      }))
      .def_property_readonly("place", [](const Known& known) {
        return std::make_pair(known.place.round, known.place.generation);
      })
      .def_readonly("turn", &Known::turn)
      .def_readonly("workers", &Known::workers)
      .def_property_readonly("texts", [](const Known& known) {
        std::string numbers =
            Text(known.place.round, " ", known.place.generation, " ",
                 known.closed, " ", known.turn, " ", known.turns.newest);
        for (const int64_t turn : known.turns.alive) {
          numbers += " " + std::to_string(turn);
        }
        std::vector<py::bytes> texts = {py::bytes(numbers)};
        // Those without values come twice.
        for (const auto* names : {&known.workers, &known.without_values}) {
          texts.insert(texts.end(), names->begin(), names->end());
        }
        return texts;
      });

  using For = RoundWait::For;
  py::enum_<For>(m, "For")
      .value("CLOSE", For::kClose)
      .value("TURN", For::kTurn)
      .value("RESTORE", For::kRestore)
      .value("READ", For::kRead);

  py::class_<Server>(m, "Server")
      .def(py::init<const std::string&, int64_t>())
      .def("set_now",
           [](Server& s, double now) { s.timer()->set_now(now); })
      .def("next_ring", [](Server& s) { return s.timer()->Next(); })
      .def("ring_due", [](Server& s) { s.timer()->RingDue(); })
      .def("known", [](Server& s) { return s.rounds()->known(); })
      .def("staged", [](Server& s) { return s.rounds()->staged(); })
      .def("start",
           [](Server& s, For what, const Place& place,
              const std::string& worker, int64_t process, int64_t most_turns,
              double turn_secs, int64_t min_workers, double grace_secs,
              double timeout_secs, py::function done) {
             RoundWait wait;
             wait.what = what;
             wait.place = place;
             wait.worker = worker;
             wait.process = process;
             wait.most_turns = most_turns;
             wait.turn_secs = turn_secs;
             wait.min_workers = min_workers;
             wait.grace_secs = grace_secs;
             wait.timeout_secs = timeout_secs;
             return s.Start(std::move(wait), std::move(done));
           },
           py::kw_only(), py::arg("what"), py::arg("place") = Place(),
           py::arg("worker") = "", py::arg("process") = 0,
           py::arg("most_turns") = 1, py::arg("turn_secs") = 0.0,
           py::arg("min_workers") = 1, py::arg("grace_secs") = kForever,
           py::arg("timeout_secs"), py::arg("done"))
      .def("stage",
           [](Server& s, const std::string& worker, const Known& known,
              double weight, int64_t count, int64_t first,
              std::vector<py::object> values) {
             return s.rounds()->Stage(worker, known, weight, count, first,
                                      std::move(values));
           })
      .def("arrive",
           [](Server& s, const std::string& worker, const Known& told) {
             Known known;
             const bool accepted = s.rounds()->Arrive(worker, told, &known);
             return std::make_pair(accepted, known);
           })
      .def("release",
           [](Server& s, const std::string& worker, int64_t turn) {
             return s.rounds()->Release(worker, turn);
           })
      .def("join",
           [](Server& s, const std::string& worker, int64_t process,
              bool resumes) {
             int64_t workers = 0;
             Check(s.rounds()->Join(worker, process, resumes, &workers));
             return workers;
           })
      .def("leave",
           [](Server& s, const std::string& worker, int64_t process) {
             return s.rounds()->Leave(worker, process);
           })
      .def("left",
           [](Server& s) {
             const std::set<std::string> left = s.rounds()->left();
             return std::vector<std::string>(left.begin(), left.end());
           })
      .def("follow",
           [](Server& s, const Known& known) {
             return s.rounds()->Follow(known);
           })
      .def("take_values",
           [](Server& s) {
             std::vector<std::pair<double, std::vector<py::object>>> taken;
             for (auto& member : s.rounds()->TakeValues()) {
               taken.emplace_back(member.weight, std::move(member.values));
             }
             return taken;
           })
      .def("check_closed",
           [](Server& s, const Known& known) {
             bool is_open = false;
             Check(s.rounds()->CheckClosed(known, &is_open));
             return is_open;
           })
      .def("next",
           [](Server& s) {
             PyRounds::Deferred after(s.rounds());
             Check(s.rounds()->Next(&after));
           })
      .def("restore",
           [](Server& s, const std::string& worker, int64_t from,
              const Place& place) {
             PyRounds::Deferred after(s.rounds());
             std::vector<py::object> values;
             bool restored = false;
             Check(s.rounds()->Restore(worker, from, place,
                                       /*needs_values=*/true, &values,
                                       &restored, &after));
             return std::make_pair(restored, values);
           });
}

}  // namespace
}  // namespace wrapopt
