// A minimal framework for the C++ tests: EXPECT, which prints what it compared.
#ifndef WRAPOPT_TESTS_CC_EXPECT_H_
#define WRAPOPT_TESTS_CC_EXPECT_H_

#include <iostream>

namespace wrapopt {

inline int failures = 0;

template <class Got, class Want>
void ExpectEqual(const Got& got, const Want& want, const char* text,
                 const char* file, int line) {
  if (got == want) return;
  ++failures;
  std::cerr << file << ":" << line << ": " << text << ": got " << got
            << " but expected " << want << "\n";
}

}  // namespace wrapopt

#define EXPECT_EQ(got, want) \
  ::wrapopt::ExpectEqual(got, want, #got, __FILE__, __LINE__)

#endif  // WRAPOPT_TESTS_CC_EXPECT_H_
