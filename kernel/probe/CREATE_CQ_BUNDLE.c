// SPDX-License-Identifier: MIT OR Apache-2.0
/* The driver's create_cq takes all attributes of the system call. */
#include <rdma/ib_verbs.h>

static inline int probe(struct ib_cq *cq, const struct ib_cq_init_attr *attributes,
			struct uverbs_attr_bundle *call)
{
	return 0;
}

static inline void probe_ops(struct ib_device_ops *ops)
{
	ops->create_cq = probe;
}
