// Definitions of symbols that g++ 12 would otherwise take from a newer glibc or
// libstdc++ than TensorFlow's own wheel needs: glibc 2.27 and the libstdc++ of
// g++ 7. No library exports them. wheel_test.py checks that the wheel needs no
// newer symbols.
#include <new>
#include <sstream>

// glibc 2.32. If true, the process has one thread, and std::shared_ptr counts
// without atomic instructions. A process with TensorFlow has many threads.
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
