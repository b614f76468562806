// Counts the blocks that torch's CPU allocator hands out and takes back, without a profiler.
//
// libc10.so takes every CPU tensor from posix_memalign and gives it to free, by its own table of imported functions. Two
// entries of that table are set to the functions below, once, when counting first begins; while nothing is counted they
// only pass on. So blocks of all threads are seen, and nothing is kept but a size for each block that is alive.
#include <nanobind/stl/pair.h>

#include "core.h"

#if defined(__linux__) && defined(__LP64__)
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <unordered_map>

namespace {
#if defined(__aarch64__)
constexpr unsigned kJumpSlot = R_AARCH64_JUMP_SLOT, kGlobal = R_AARCH64_GLOB_DAT;
#else
constexpr unsigned kJumpSlot = R_X86_64_JUMP_SLOT, kGlobal = R_X86_64_GLOB_DAT;
#endif

std::atomic<bool> counting{false};
std::atomic_flag busy = ATOMIC_FLAG_INIT;
std::unordered_map<void*, size_t>* sizes = nullptr;  // of the blocks allocated since counting began; never destroyed
long live = 0, peak = 0;
int (*memalign_before)(void**, size_t, size_t) = nullptr;
void (*free_before)(void*) = nullptr;

struct Turn {  // short: the table of sizes is looked up inside, and nothing else
  Turn() {
    while (busy.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~Turn() { busy.clear(std::memory_order_release); }
};

int counted_memalign(void** block, size_t alignment, size_t size) {
  const int failed = memalign_before(block, alignment, size);
  if (!failed && counting.load(std::memory_order_relaxed)) {
    Turn turn;
    (*sizes)[*block] = size;
    live += static_cast<long>(size);
    if (live > peak) peak = live;
  }
  return failed;
}

void counted_free(void* block) {
  if (block && counting.load(std::memory_order_relaxed)) {
    Turn turn;
    const auto found = sizes->find(block);  // older blocks, and what is not a tensor, are not in it
    if (found != sizes->end()) {
      live -= static_cast<long>(found->second);
      sizes->erase(found);
    }
  }
  free_before(block);
}

// Sets an entry of a table that the loader may have made read-only.
bool set(void** entry, void* function) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  void* start = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(entry) & ~(page - 1));
  if (mprotect(start, page, PROT_READ | PROT_WRITE)) return false;
  *entry = function;
  return true;
}

struct Found {
  void** memalign = nullptr;
  void** free[2] = {};
  int frees = 0;
};

// The entries of posix_memalign and free among a library's imports.
int look(dl_phdr_info* library, size_t, void* data) {
  const char* name = std::strrchr(library->dlpi_name, '/');
  if (!name || std::strcmp(name, "/libc10.so") != 0) return 0;
  auto* found = static_cast<Found*>(data);
  const uintptr_t base = library->dlpi_addr;
  const ElfW(Dyn)* dynamic = nullptr;
  for (int i = 0; i < library->dlpi_phnum; ++i)
    if (library->dlpi_phdr[i].p_type == PT_DYNAMIC)
      dynamic = reinterpret_cast<const ElfW(Dyn)*>(base + library->dlpi_phdr[i].p_vaddr);
  uintptr_t symbols = 0, strings = 0, tables[2] = {};
  size_t bytes[2] = {};
  const auto address = [base](uintptr_t place) { return place < base ? base + place : place; };
  for (; dynamic && dynamic->d_tag != DT_NULL; ++dynamic) {
    if (dynamic->d_tag == DT_SYMTAB) symbols = address(dynamic->d_un.d_ptr);
    if (dynamic->d_tag == DT_STRTAB) strings = address(dynamic->d_un.d_ptr);
    if (dynamic->d_tag == DT_JMPREL) tables[0] = address(dynamic->d_un.d_ptr);
    if (dynamic->d_tag == DT_PLTRELSZ) bytes[0] = dynamic->d_un.d_val;
    if (dynamic->d_tag == DT_RELA) tables[1] = address(dynamic->d_un.d_ptr);
    if (dynamic->d_tag == DT_RELASZ) bytes[1] = dynamic->d_un.d_val;
  }
  if (!symbols || !strings) return 1;
  for (int table = 0; table < 2; ++table) {
    const auto* one = reinterpret_cast<const ElfW(Rela)*>(tables[table]);
    for (size_t i = 0; one && i < bytes[table] / sizeof(ElfW(Rela)); ++i, ++one) {
      const auto kind = ELF64_R_TYPE(one->r_info);
      if (kind != kJumpSlot && kind != kGlobal) continue;
      const auto& symbol = reinterpret_cast<const ElfW(Sym)*>(symbols)[ELF64_R_SYM(one->r_info)];
      const char* word = reinterpret_cast<const char*>(strings) + symbol.st_name;
      auto** entry = reinterpret_cast<void**>(base + one->r_offset);
      if (!std::strcmp(word, "posix_memalign")) found->memalign = entry;
      if (!std::strcmp(word, "free") && found->frees < 2) found->free[found->frees++] = entry;
    }
  }
  return 1;
}

// Whether torch's allocator can be counted here; the first call sets the entries.
bool available() {
  static const bool done = [] {
    Found found;
    dl_iterate_phdr(look, &found);
    if (!found.memalign || !found.frees) return false;
    memalign_before = &posix_memalign;
    free_before = &std::free;
    sizes = new std::unordered_map<void*, size_t>;
    pthread_atfork(nullptr, nullptr, [] { busy.clear(); });  // its holder is not in the child
    bool good = set(found.memalign, reinterpret_cast<void*>(&counted_memalign));
    for (int i = 0; i < found.frees; ++i) good = good && set(found.free[i], reinterpret_cast<void*>(&counted_free));
    return good;
  }();
  return done;
}

// Begins to count -> false if counting is not possible, or already on.
bool begin() {
  if (!available() || counting) return false;
  Turn turn;
  sizes->clear();
  live = peak = 0;
  counting = true;
  return true;
}

// Ends counting -> the most bytes that were alive at once, and those that are alive still.
std::pair<long, long> end() {
  counting = false;
  Turn turn;
  std::unordered_map<void*, size_t>().swap(*sizes);
  return {peak, live};
}
}  // namespace
#else
namespace {
bool available() { return false; }
bool begin() { return false; }
std::pair<long, long> end() { return {0, 0}; }
}  // namespace
#endif

void bind_allocations(nb::module_& m) {
  m.def("allocations_available", &available);
  m.def("allocations_begin", &begin);
  m.def("allocations_end", &end);
}
