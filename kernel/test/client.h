/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* A kernel client: two ends on one device, and the tests of the verbs between them. */
#ifndef IWARP_CLIENT_TEST_H
#define IWARP_CLIENT_TEST_H

#include <rdma/ib_verbs.h>
#include <rdma/rdma_cm.h>

#define BUFFER 65536
/* Time limit of a hanging test. */
#define PATIENCE (60 * HZ)

#define EXPECT(condition)							\
	do {									\
		if (!(condition)) {						\
			pr_err("%s:%d: expected: %s\n", __func__, __LINE__,	\
			       #condition);					\
			return -EIO;						\
		}								\
	} while (0)

struct end {
	struct rdma_cm_id *id;
	struct ib_pd *pd;
	struct ib_cq *cq;
	struct ib_srq *srq;
	struct ib_mr *mr;
	u8 *buffer;
	struct completion happened;
	enum rdma_cm_event_type event;
	/* Calls of the completion handler, and the processor of the last one. */
	atomic_t calls;
	int processor;
};

struct pair {
	struct rdma_cm_id *listener;
	struct end a;		/* who connects */
	struct end b;
};

struct test {
	const char *name;
	int (*run)(struct pair *pair);
	/* The second end has a shared receive queue. */
	bool srq;
};

#define VECTOR 1

/* client.c */
int await(struct end *end, enum rdma_cm_event_type event);
struct ib_sge part(const struct end *end, u32 from, u32 len);
int post_receive(struct end *end, u64 wr_id, u32 from, u32 len);
int post_send(struct end *end, u64 wr_id, u32 from, u32 len, int flags);
int post_rdma(struct end *end, enum ib_wr_opcode opcode, u64 wr_id, struct ib_sge sge,
	      u64 remote_addr, u32 rkey);
int next(struct end *end, struct ib_wc *wc);
int expect(struct end *end, u64 wr_id, enum ib_wc_opcode opcode);
int await_calls(const struct end *end, int calls);

/* verbs.c */
extern const struct test tests[];
extern const int test_count;

/* senders.c */
extern const struct test sender_tests[];
extern const int sender_test_count;

#endif
