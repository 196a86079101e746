// A folder for tensor parallelism: shared.safetensors (what every rank holds whole, the manifest's sources, the seals of all rank files) and
// rank-<r>-of-<N>.safetensors (that rank's slices), each a packed image of its own. Rules, from the recipe's tp column:
//   column  rows of the output, each member of a stack on its own, attention by heads; its bias likewise. With more ranks than key heads, as many
//           ranks hold the same one
//   row     columns of the input, attention by heads; a bias is shared and added behind the sum
//   vocab   rows
// Scales follow their weights; those that a slice shares with others (one per tensor, one per row of a row-parallel weight) stand in every rank's
// file.
#ifndef K3_LOADER_SPLIT_H
#define K3_LOADER_SPLIT_H

#include "loader/verify.h"
#include "loader/writer.h"

enum { K3_PART_SHARED = -1 };
#define K3_SPLIT_SHARED_NAME "shared.safetensors"

// The plan of one file, laid out, from a mapped plan (not laid out: its shards stand by module instance), which must outlive it. PCK05 with
// K3_UNSUPPORTED, naming the ranks that would work, when a slice would cut a head, a scale group or a 128-block; K3_UNSUPPORTED when the recipe
// splits nothing. Free with k3_split_part_free; on failure *part is empty.
//   rank        0 .. tp - 1, or K3_PART_SHARED
//   rank_seals  [tp] hex, for the shared file
enum k3_status k3_split_part(const struct k3_plan *mapped, uint32_t tp, int32_t rank, const char *const *rank_seals, struct k3_plan *part,
                             struct k3_findings *findings, struct k3_error *err);
void k3_split_part_free(struct k3_plan *part);

// Whether a mapped plan (not laid out) can be cut for tp ranks: PCK05 as above.
enum k3_status k3_split_check(const struct k3_plan *mapped, uint32_t tp, struct k3_error *err);

// Writes the whole folder options->path: under a temporary name, renamed at the end, so that a failure leaves nothing and an old folder untouched.
// options->replace replaces a folder that holds nothing but such files. result->identity is the shared file's seal, which names all of them.
enum k3_status k3_split_write(const struct k3_plan *mapped, uint32_t tp, const struct k3_writer_options *options, struct k3_writer_result *result,
                              struct k3_findings *findings, struct k3_error *err);

// Whether `path` is such a folder: it holds a shared.safetensors.
bool k3_is_split_folder(const char *path);
// Whether `path` may be a packed image: IMG01 with K3_BAD_INPUT for a folder of other files. What is in a file is for its reader to find out.
enum k3_status k3_may_be_image(const char *path, struct k3_error *err);
// "rank-0-of-4.safetensors"; at most 64 bytes. Returns dst.
char *k3_split_rank_name(char dst[64], uint32_t rank, uint32_t tp);

// Verifies every file of a folder and that the rank files are those whose seals the shared file names. As k3_verify_image; counts add up.
enum k3_status k3_verify_split(const char *folder, int n_threads, struct k3_progress *progress, struct k3_verify_result *result, uint32_t *tp,
                               struct k3_findings *findings, struct k3_error *err);

#endif
