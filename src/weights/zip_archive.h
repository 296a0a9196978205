// ZIP archives as PyTorch writes them: records one after the other, not compressed, and a directory
// at the end. Format: PKWARE's APPNOTE 6.3.

#pragma once

#include "src/weights/input_file.h"

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace semitone::weights {

// The records of an archive, by their names without the archive's own folder: "data.pkl" for
// "archive/data.pkl".
//
// Nothing is unpacked, so that no record is larger than the file. Records that are compressed, as
// the code of TorchScript modules, are known by name only. Checksums are not compared, as in
// PyTorch, which can leave them out (torch.serialization.set_crc32_options).
class ZipArchive {
 public:
  // Reads and checks the whole directory. FileError if it is not at the end of the file, does not
  // have the number of records that it states, names one twice, or if a record lies outside the
  // file or overlaps another. The file must live as long as this object.
  explicit ZipArchive(const InputFile& file);

  bool has(const std::string& name) const { return records_.contains(name); }

  // The number of bytes. FileError if there is no such record, or if it is compressed or encrypted.
  std::uint64_t size_of(const std::string& name) const;
  // Fills a buffer of that size.
  void read(const std::string& name, void* buffer) const;
  // The whole record. FileError with this remedy if it is larger than the limit.
  std::string text(const std::string& name, std::uint64_t limit,
                   std::string_view remedy = kCopyAgain) const;

  struct Record {
    std::uint64_t begin;  // in the file
    std::uint64_t size;
    bool is_plain;  // neither compressed nor encrypted
  };
  const std::map<std::string, Record>& records() const { return records_; }

 private:
  const Record& find(const std::string& name) const;

  const InputFile& file_;
  std::map<std::string, Record> records_;
};

}  // namespace semitone::weights
