/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* A kernel client with two connected endpoints on one device, and the tests of its verbs. */
#ifndef IWARP_CLIENT_TEST_H
#define IWARP_CLIENT_TEST_H

#include <rdma/ib_verbs.h>
#include <rdma/rdma_cm.h>

#define BUFFER 65536
/* Time limit for a test that hangs. */
#define PATIENCE (60 * HZ)

#define EXPECT(condition)							\
	do {									\
		if (!(condition)) {						\
			pr_err("%s:%d: expected: %s\n", __func__, __LINE__,	\
			       #condition);					\
			return -EIO;						\
		}								\
	} while (0)

struct endpoint {
	struct rdma_cm_id *id;
	struct ib_pd *pd;
	struct ib_cq *cq;
	struct ib_srq *srq;
	struct ib_mr *mr;
	u8 *buffer;
	struct completion event_received;
	enum rdma_cm_event_type event;
	/* Calls of the completion handler, and the processor of the last one. */
	atomic_t calls;
	int processor;
};

struct pair {
	struct rdma_cm_id *listener;
	struct endpoint a;	/* the initiator */
	struct endpoint b;
};

struct test {
	const char *name;
	int (*run)(struct pair *pair);
	/* The endpoint `b` has a shared receive queue. */
	bool srq;
};

/* Completion vector of the endpoints' queues. */
#define VECTOR 1

/* client.c */
int await(struct endpoint *ep, enum rdma_cm_event_type event);
struct ib_sge part(const struct endpoint *ep, u32 from, u32 len);
int post_receive(struct endpoint *ep, u64 wr_id, u32 from, u32 len);
int post_send(struct endpoint *ep, u64 wr_id, u32 from, u32 len, int flags);
int post_rdma(struct endpoint *ep, enum ib_wr_opcode opcode, u64 wr_id, struct ib_sge sge,
	      u64 remote_addr, u32 rkey);
int next_completion(struct endpoint *ep, struct ib_wc *wc);
int expect(struct endpoint *ep, u64 wr_id, enum ib_wc_opcode opcode);
int await_calls(const struct endpoint *ep, int calls);

/* verbs.c */
extern const struct test tests[];
extern const int test_count;

/* senders.c */
extern const struct test sender_tests[];
extern const int sender_test_count;

#endif
