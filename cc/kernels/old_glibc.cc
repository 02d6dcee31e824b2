// What g++ 12 would otherwise take from a glibc or libstdc++ that is newer than
// those of TensorFlow's own wheel, glibc 2.27 and libstdc++ of g++ 7. Hidden, as
// all symbols of the library are. tests/wheel_test.py holds the wheel to that.
#include <new>
#include <sstream>

// glibc 2.32. Whether the process has one thread, so that std::shared_ptr may
// count without atomic instructions: a process with TensorFlow has many.
extern "C" {
char __libc_single_threaded = 0;  // NOLINT
}

// libstdc++ of g++ 11.
namespace std {
void __throw_bad_array_new_length() { throw std::bad_array_new_length(); }
}  // namespace std

// libstdc++ of g++ 9.
template std::basic_ostringstream<char>::basic_ostringstream();
template std::basic_stringstream<char>::basic_stringstream();
