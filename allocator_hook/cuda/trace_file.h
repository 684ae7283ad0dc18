// Appends records to a trace file in the format of ../FORMAT.md. Not thread-safe: callers hold the recorder's mutex.
#pragma once

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <string>
#include <unordered_map>
#include <vector>

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

namespace trace {

enum Kind : uint8_t {
  HEADER = 1,
  TEXT = 2,
  ALLOCATION = 3,
  FAILED_ALLOCATION = 4,
  FREE = 5,
  ENTER = 6,
  LEAVE = 7,
  COLLECTIVE = 8,
  LABEL = 9,
  END = 10,
};

struct Record {
  uint8_t kind;
  uint8_t flags;
  int16_t device;
  uint32_t sequence;
  uint64_t time_ns;
  uint64_t pointer;
  uint64_t bytes;
  uint64_t stream;
  uint32_t text;
  uint32_t checksum;
};
static_assert(sizeof(Record) == 48, "a record is 48 bytes without padding");

struct TextPiece {
  uint8_t kind;
  uint8_t flags;
  int16_t used;
  uint32_t sequence;
  char text[36];
  uint32_t checksum;
};
static_assert(sizeof(TextPiece) == sizeof(Record), "a text piece has the size of a record");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "records are written in their in-memory representation");

constexpr uint32_t kResidue = 0x2144DF1C;  // CRC-32 of any bytes followed by their own CRC-32
constexpr size_t kSealed = sizeof(Record) - sizeof(uint32_t);
constexpr size_t kBlockBytes = 85 * sizeof(Record);  // just under a page; a killed process loses at most this much

// CRC-32 as in zlib, computed eight bytes at a time.
class Crc32 {
 public:
  Crc32() {
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ (c & 1 ? 0xEDB88320u : 0);
      table_[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; ++i)
      for (int t = 1; t < 8; ++t) table_[t][i] = (table_[t - 1][i] >> 8) ^ table_[0][table_[t - 1][i] & 0xFF];
  }

  uint32_t operator()(const void* data, size_t size, uint32_t before) const {
    const auto* bytes = static_cast<const uint8_t*>(data);
    uint32_t crc = ~before;
    for (; size >= 8; size -= 8, bytes += 8) {
      uint32_t low, high;
      std::memcpy(&low, bytes, 4);
      std::memcpy(&high, bytes + 4, 4);
      low ^= crc;
      crc = table_[7][low & 0xFF] ^ table_[6][low >> 8 & 0xFF] ^ table_[5][low >> 16 & 0xFF] ^ table_[4][low >> 24] ^
            table_[3][high & 0xFF] ^ table_[2][high >> 8 & 0xFF] ^ table_[1][high >> 16 & 0xFF] ^ table_[0][high >> 24];
    }
    for (; size > 0; --size, ++bytes) crc = (crc >> 8) ^ table_[0][(crc ^ *bytes) & 0xFF];
    return ~crc;
  }

 private:
  uint32_t table_[8][256];
};

inline uint64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

class File {
 public:
  bool is_open() const { return descriptor_ >= 0; }
  uint64_t records() const { return sequence_; }

  // Starts a trace. The file is renamed to `path` after its header is written, so a file at `path` is always readable.
  // Returns 0 or an errno.
  int open(const std::string& path, const std::string& header) {
    const std::string unfinished = path + "." + std::to_string(getpid()) + ".tmp";
    descriptor_ = ::open(unfinished.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (descriptor_ < 0) return errno;
    path_ = path;
    sequence_ = 0;
    texts_.clear();
    buffer_.clear();
    append_preamble();
    append_text(HEADER, header);
    int error = write_out();
    if (error == 0 && std::rename(unfinished.c_str(), path.c_str()) != 0) error = errno;
    if (error != 0) {
      ::unlink(unfinished.c_str());
      abandon();
    }
    return error;
  }

  void append(Kind kind, uint8_t flags, int device, uint64_t pointer, uint64_t bytes, uint64_t stream, uint32_t text) {
    if (!is_open()) return;
    Record record{
        kind, flags, static_cast<int16_t>(device), static_cast<uint32_t>(sequence_++), monotonic_ns(), pointer, bytes, stream,
        text, 0};
    record.checksum = crc_(&record, kSealed, kResidue);
    put(&record, sizeof record);
    if (buffer_.size() >= kBlockBytes) flush();
  }

  // Returns the number of a text. A new text is written to the file first.
  uint32_t text(const std::string& text) {
    if (!is_open()) return 0;
    auto [found, is_new] = texts_.try_emplace(text, static_cast<uint32_t>(texts_.size()));
    if (is_new) append_text(TEXT, text);
    return found->second;
  }

  // Writes all buffered records to the file. If this fails, recording stops with one message and training continues.
  void flush() {
    if (!is_open()) return;
    if (const int error = write_out()) {
      dprintf(STDERR_FILENO, "allocator_hook: recording stopped, cannot write %s: %s; training continues\n", path_.c_str(),
              strerror(error));
      abandon();
    }
  }

  // Writes the end record and closes the file. Returns 0 or an errno.
  int close() {
    if (!is_open()) return 0;
    append(END, 0, 0, 0, 0, 0, 0);
    flush();
    if (!is_open()) return EIO;
    const int error = ::close(descriptor_) == 0 ? 0 : errno;
    descriptor_ = -1;
    return error;
  }

  // Closes the file and discards the records that are not written yet.
  void abandon() {
    if (is_open()) ::close(descriptor_);
    descriptor_ = -1;
    buffer_.clear();
  }

 private:
  void put(const void* data, size_t size) {
    const auto* bytes = static_cast<const char*>(data);
    buffer_.insert(buffer_.end(), bytes, bytes + size);
  }

  void append_preamble() {
    struct {
      char magic[8];
      uint16_t major, minor;
      uint32_t record_bytes;
      char zero[28];
      uint32_t checksum;
    } preamble{{'\x89', 'M', 'E', 'M', 'T', 'R', 'C', '\n'}, 1, 2, sizeof(Record), {}, 0};
    static_assert(sizeof preamble == sizeof(Record), "the preamble has the size of a record");
    preamble.checksum = crc_(&preamble, kSealed, 0);
    put(&preamble, sizeof preamble);
  }

  void append_text(Kind kind, const std::string& text) {
    size_t at = 0;
    do {
      TextPiece piece{};
      const size_t used = std::min(sizeof piece.text, text.size() - at);
      std::memcpy(piece.text, text.data() + at, used);
      at += used;
      piece.kind = kind;
      piece.flags = at < text.size() ? 1 : 0;
      piece.used = static_cast<int16_t>(used);
      piece.sequence = static_cast<uint32_t>(sequence_++);
      piece.checksum = crc_(&piece, kSealed, kResidue);
      put(&piece, sizeof piece);
    } while (at < text.size());
  }

  // Writes the buffer. Exceeding a file size limit returns EFBIG: SIGXFSZ, which would end the process, is blocked.
  int write_out() {
    sigset_t too_large, before;
    sigemptyset(&too_large);
    sigaddset(&too_large, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &too_large, &before);
    int error = 0;
    for (size_t done = 0; done < buffer_.size() && error == 0;) {
      const ssize_t written = ::write(descriptor_, buffer_.data() + done, buffer_.size() - done);
      if (written >= 0)
        done += static_cast<size_t>(written);
      else if (errno != EINTR)
        error = errno;
    }
    if (error == EFBIG && !sigismember(&before, SIGXFSZ)) {
      const timespec at_once{};
      sigtimedwait(&too_large, nullptr, &at_once);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    buffer_.clear();
    return error;
  }

  int descriptor_ = -1;
  uint64_t sequence_ = 0;
  std::string path_;
  std::vector<char> buffer_;
  std::unordered_map<std::string, uint32_t> texts_;
  Crc32 crc_;
};

}  // namespace trace
