// Between the files that open a checkpoint; nobody else includes this.
#ifndef K3_LOADER_CKPT_PARTS_H
#define K3_LOADER_CKPT_PARTS_H

#include "loader/ckpt.h"

// A sorted list of names in memory of its own. Zero-initialise; free with k3_names_free.
struct k3_names {
  char **items;
  size_t n_items, capacity;
};
enum k3_status k3_names_add(struct k3_names *names, const char *name, size_t nbytes, struct k3_error *err);
void k3_names_sort(struct k3_names *names);
bool k3_names_has(const struct k3_names *names, const char *name);  // by linear or binary search: after k3_names_sort only
void k3_names_free(struct k3_names *names);

// What a folder holds, by kind. Names without the folder.
struct k3_folder_listing {
  struct k3_names weights;     // *.safetensors
  struct k3_names documents;   // *.json
  struct k3_names unfinished;  // *.incomplete, *.part, *.aria2, *.tmp, *.bak
  struct k3_names pickles;     // *.bin, *.pt, *.pth, *.ckpt
};
enum k3_status k3_folder_list(const char *folder, struct k3_folder_listing *listing, struct k3_error *err);
void k3_folder_listing_free(struct k3_folder_listing *listing);

// Decides which files of the folder make up the checkpoint (rules CNT09, IDX01, IDX05, IDX06, IDX08, IDX09, IDX10, MAP09) and appends their names to
// `chosen`, sorted. Sets *index_name (owned by the listing) to the index in use, or NULL. Fails only for lack of memory or a failed read.
enum k3_status k3_folder_choose(const char *folder, const struct k3_folder_listing *listing, const struct k3_ckpt_options *options,
                                struct k3_names *chosen, const char **index_name, struct k3_findings *findings, struct k3_error *err);

// Holds the index against the tensors that were found (IDX02, IDX04, IDX07) and fills ckpt->promised.
enum k3_status k3_folder_check_index(struct k3_ckpt *ckpt, const char *index_name, const struct k3_ckpt_options *options,
                                     struct k3_findings *findings, struct k3_error *err);

// Folder of the snapshot that "hf:org/name[@revision]" names in the local cache: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub.
// New memory. K3_BAD_ARGUMENT for a malformed name, K3_IO when the cache does not hold it.
enum k3_status k3_hf_snapshot(const char *source, char **folder, struct k3_error *err);

#endif
