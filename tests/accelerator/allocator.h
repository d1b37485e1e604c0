// Memory of the test accelerator: segments and blocks by the rules of CUDA's caching allocator, counted and refused.
//
// Its pages are shared mappings, so that a process's private memory (VmData, RssAnon) does not hold them, as with a GPU.
// What all processes together may reserve stands in a ledger, a file that they share if FEDTEST_LEDGER names one.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace fedtest {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 4;
constexpr size_t MiB = 1 << 20;
constexpr size_t kMinBlock = 512, kSmallSize = MiB, kSmallBuffer = 2 * MiB, kLargeBuffer = 20 * MiB;
constexpr size_t kMinLarge = 10 * MiB, kRoundLarge = 2 * MiB;

inline thread_local int t_running = -1;  // device whose operator this thread runs: its allocations are that device's
inline thread_local int t_current = 0;

// ------------------------------------------------------------------------------------------------------- the ledger

struct Slot {  // of one process; of a dead one, nothing counts
  int32_t pid;
  int32_t padding;
  int64_t held[kMaxDevices];  // reserved, and the context
};

struct Ledger {
  int64_t total[kMaxDevices];  // of each device; 0: as good as endless
  int64_t taken[kMaxDevices];  // by other programs, as a test plays them
  Slot slots[64];
};

inline Ledger& ledger() {
  static Ledger* made = [] {
    const char* path = getenv("FEDTEST_LEDGER");
    int fd = path && *path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    TORCH_CHECK(fd >= 0 || !path || !*path, "fedtest: cannot open the ledger ", path ? path : "");
    if (fd >= 0) TORCH_CHECK(lseek(fd, 0, SEEK_END) >= off_t(sizeof(Ledger)) || ftruncate(fd, sizeof(Ledger)) == 0);
    void* at = mmap(nullptr, sizeof(Ledger), PROT_READ | PROT_WRITE, fd >= 0 ? MAP_SHARED : MAP_SHARED | MAP_ANONYMOUS, fd, 0);
    TORCH_CHECK(at != MAP_FAILED, "fedtest: cannot map the ledger");
    return static_cast<Ledger*>(at);
  }();
  return *made;
}

inline bool alive(int32_t pid) { return pid > 0 && (kill(pid, 0) == 0 || errno == EPERM); }

inline Slot& own_slot() {
  static Slot* found = [] {
    for (Slot& slot : ledger().slots) {
      int32_t before = __atomic_load_n(&slot.pid, __ATOMIC_ACQUIRE);
      if (before == getpid()) return &slot;
      if (!alive(before) && __atomic_compare_exchange_n(&slot.pid, &before, getpid(), false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
        memset(slot.held, 0, sizeof slot.held);
        return &slot;
      }
    }
    TORCH_CHECK(false, "fedtest: too many processes share the ledger");
  }();
  return *found;
}

inline size_t total_of(int device) { return ledger().total[device] > 0 ? ledger().total[device] : int64_t(1) << 40; }

inline size_t held_by_all(int device) {
  int64_t sum = ledger().taken[device];
  for (const Slot& slot : ledger().slots)
    if (alive(slot.pid)) sum += slot.held[device];
  return size_t(sum);
}

// ---------------------------------------------------------------------------------------------------- the allocator

struct Pool;
struct Block {
  int device;
  char* ptr;
  size_t size;
  Pool* pool;
  bool used = false;
  Block *prev = nullptr, *next = nullptr;
};
struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return a->size != b->size ? a->size < b->size : a->ptr < b->ptr;
  }
};
struct Pool {
  bool small;
  std::set<Block*, BySize> free;
};

struct Event {
  int64_t id, size;  // a size below zero: freed
};

struct Memory {
  std::mutex mutex;
  Pool small{true, {}}, large{false, {}};
  size_t allowed = SIZE_MAX;         // set_per_process_memory_fraction
  size_t allocated = 0, reserved = 0, peak_allocated = 0, peak_reserved = 0;
  int64_t ooms = 0, retries = 0, next_id = 0;
  bool traced = false;
  std::vector<Event> trace;
  std::unordered_map<void*, int64_t> ids;
};
inline Memory g_memory[kMaxDevices];
inline int g_devices = 1;

inline size_t rounded(size_t n) { return n < kMinBlock ? kMinBlock : (n + kMinBlock - 1) / kMinBlock * kMinBlock; }
inline size_t segment_size(size_t n) {
  if (n <= kSmallSize) return kSmallBuffer;
  return n < kMinLarge ? kLargeBuffer : (n + kRoundLarge - 1) / kRoundLarge * kRoundLarge;
}

// Segments lie at rising addresses, none twice: of equal blocks, the one of the older segment is taken.
inline void* next_address(int device, size_t size) {
  static char* next[kMaxDevices] = {};
  if (!next[device]) {
    void* range = mmap(nullptr, size_t(8) << 40, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(range != MAP_FAILED, "fedtest: no address space");
    next[device] = static_cast<char*>(range);
  }
  char* at = next[device];
  next[device] += size + MiB;
  return at;
}

inline Block* new_segment(Memory& m, int device, Pool& pool, size_t n) {
  size_t size = segment_size(n);
  if (m.reserved + size > m.allowed || held_by_all(device) + size > total_of(device)) return nullptr;
  void* ptr = next_address(device, size);
  if (mmap(ptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
    return nullptr;
  own_slot().held[device] += size;
  m.reserved += size;
  m.peak_reserved = std::max(m.peak_reserved, m.reserved);
  return new Block{device, static_cast<char*>(ptr), size, &pool};
}

inline void release_cached(Memory& m) {
  for (Pool* pool : {&m.large, &m.small}) {
    for (auto it = pool->free.begin(); it != pool->free.end();) {
      Block* block = *it;
      if (block->prev || block->next) {
        ++it;
        continue;
      }
      it = pool->free.erase(it);
      constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
      TORCH_CHECK(mmap(block->ptr, block->size, PROT_NONE, flags, -1, 0) != MAP_FAILED);
      m.reserved -= block->size;
      own_slot().held[block->device] -= block->size;
      delete block;
    }
  }
}

inline std::string mib(size_t n) {
  char text[32];
  snprintf(text, sizeof text, "%.2f MiB", n / double(MiB));
  return text;
}

inline std::mutex g_blocks_mutex;
inline std::unordered_map<void*, Block*> g_blocks;  // in use, of all devices
inline c10::DeleterFnPtr g_usual_delete = nullptr;

// What a driver takes before it serves anything: once per process and device, never given back, in no statistics.
inline void make_context(int device) {
  static bool made[kMaxDevices] = {};
  if (made[device]) return;
  const char* told = getenv("FEDTEST_CONTEXT");
  const size_t size = told ? size_t(atoll(told)) : 0;
  TORCH_CHECK(
      held_by_all(device) + size <= total_of(device), "fedtest error: out of memory; the context of device ", device,
      " needs ", mib(size), ", ", mib(total_of(device) - std::min(total_of(device), held_by_all(device))), " are free");
  own_slot().held[device] += size;
  made[device] = true;
}

inline void* take(int device, size_t wanted) {
  Memory& m = g_memory[device];
  make_context(device);
  std::lock_guard<std::mutex> lock(m.mutex);
  size_t n = rounded(wanted);
  Pool& pool = n <= kSmallSize ? m.small : m.large;
  Block key{device, nullptr, n, &pool}, *block = nullptr;
  auto found = pool.free.lower_bound(&key);
  if (found != pool.free.end()) {
    block = *found;
    pool.free.erase(found);
  } else if (!(block = new_segment(m, device, pool, n))) {
    release_cached(m);
    m.retries += 1;
    block = new_segment(m, device, pool, n);
  }
  if (!block) {
    m.ooms += 1;
    // torch.OutOfMemoryError in Python, as CUDA's
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "fedtest out of memory. Tried to allocate ", mib(n), ". Device ", device,
        " has a total capacity of ", mib(total_of(device)), ", ", mib(m.reserved), " are reserved, ", mib(m.allocated),
        " of these allocated; ", mib(std::min(m.allowed, total_of(device))), " allowed");
  }
  size_t rest = block->size - n;
  if (pool.small ? rest >= kMinBlock : rest > kSmallSize) {
    Block* after = new Block{device, block->ptr + n, rest, &pool, false, block, block->next};
    if (after->next) after->next->prev = after;
    block->next = after;
    block->size = n;
    pool.free.insert(after);
  }
  block->used = true;
  m.allocated += block->size;
  m.peak_allocated = std::max(m.peak_allocated, m.allocated);
  if (m.traced) {
    m.ids[block->ptr] = m.next_id;
    m.trace.push_back({m.next_id++, int64_t(wanted)});
  }
  c10::reportMemoryUsageToProfiler(
      block->ptr, int64_t(block->size), m.allocated, m.reserved, c10::Device(kType, c10::DeviceIndex(device)));
  std::lock_guard<std::mutex> also(g_blocks_mutex);
  g_blocks[block->ptr] = block;
  return block->ptr;
}

inline void merge(Memory& m, Block* kept, Block* gone) {
  if (!gone || gone->used) return;
  kept->pool->free.erase(gone);
  if (kept->prev == gone) {
    kept->ptr = gone->ptr;
    kept->prev = gone->prev;
    if (kept->prev) kept->prev->next = kept;
  } else {
    kept->next = gone->next;
    if (kept->next) kept->next->prev = kept;
  }
  kept->size += gone->size;
  delete gone;
}

inline void give_back(void* ptr) {
  Block* block = nullptr;
  {
    std::lock_guard<std::mutex> lock(g_blocks_mutex);
    auto found = g_blocks.find(ptr);
    if (found != g_blocks.end()) {
      block = found->second;
      g_blocks.erase(found);
    }
  }
  if (!block) {  // of the host
    if (ptr) g_usual_delete(ptr);
    return;
  }
  Memory& m = g_memory[block->device];
  std::lock_guard<std::mutex> lock(m.mutex);
  if (m.traced && m.ids.count(block->ptr)) {
    m.trace.push_back({m.ids[block->ptr], -1});
    m.ids.erase(block->ptr);
  }
  block->used = false;
  m.allocated -= block->size;
  c10::reportMemoryUsageToProfiler(
      block->ptr, -int64_t(block->size), m.allocated, m.reserved,
      c10::Device(kType, c10::DeviceIndex(block->device)));
  merge(m, block, block->prev);
  merge(m, block, block->next);
  block->pool->free.insert(block);
}

// A pointer is its own context, or `raw_allocate`, which oneDNN's scratch comes by, refuses it.
inline c10::DataPtr data_on(int device, size_t n, c10::Device label) {
  if (n == 0) return {nullptr, label};
  void* ptr = take(device, n);
  return {ptr, ptr, &give_back, label};
}

// `allocate` is const before torch 2.3, which is also when `copy_data` came: both are there, only one overrides.
#define ALLOCATE(body)                             \
  c10::DataPtr allocate(size_t n) const { body }   \
  c10::DataPtr allocate(size_t n) { body }         \
  void copy_data(void* to, const void* from, size_t n) const { memcpy(to, from, n); }

struct DeviceAllocator final : c10::Allocator {
  ALLOCATE(return data_on(t_current, n, c10::Device(kType, c10::DeviceIndex(t_current)));)
};
inline DeviceAllocator g_device_allocator;

struct HostAllocator final : c10::Allocator {  // the CPU's, except while one of our operators runs
  c10::Allocator* usual = nullptr;
  ALLOCATE(return t_running >= 0 ? data_on(t_running, n, c10::Device(c10::DeviceType::CPU)) : usual->allocate(n);)
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
};
inline HostAllocator g_host_allocator;

struct Running {
  int before = t_running;
  explicit Running(int device) { t_running = device; }
  ~Running() { t_running = before; }
};

}  // namespace fedtest
