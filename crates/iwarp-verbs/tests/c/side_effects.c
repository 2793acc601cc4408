/* Tests that a refused call has no side effects, and that destroying an object does not affect
 * other objects. */
#include "check.h"

#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SIZE = 4096, MANY = 40, QKEY = 0x11111111 };

static const int LOCAL = IBV_ACCESS_LOCAL_WRITE;
static const int TO_INIT = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;

static struct ibv_qp *create_qp(enum ibv_qp_type type, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = type,
		.cap = { .max_send_wr = 4, .max_recv_wr = MANY, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);

	NEED(qp);
	NEED(ibv_modify_qp(qp, &init, TO_INIT | (type == IBV_QPT_UD
		? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)) == 0);
	return qp;
}

static void move_to(struct ibv_qp *qp, enum ibv_qp_state state, int mask)
{
	struct ibv_qp_attr attr = { .qp_state = state, .en_sqd_async_notify = 1 };

	NEED(ibv_modify_qp(qp, &attr, IBV_QP_STATE | mask) == 0);
}

/* A refused ibv_modify_qp does not change the queue pair or its public structure. */
static void test_refused_state_change(void)
{
	static const enum ibv_qp_state WRONG[] = { IBV_QPS_SQD, IBV_QPS_SQE, IBV_QPS_UNKNOWN };
	static const enum ibv_qp_type TYPES[] = { IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD };
	struct ibv_qp_init_attr init;
	unsigned i, k;

	for (k = 0; k < sizeof(TYPES) / sizeof(*TYPES); k++) {
		struct ibv_qp *qp = create_qp(TYPES[k], NULL);
		struct ibv_qp_attr reported;

		for (i = 0; i < sizeof(WRONG) / sizeof(*WRONG); i++) {
			struct ibv_qp_attr attr = { .qp_state = WRONG[i], .qkey = QKEY + 1 };
			int mask = IBV_QP_STATE | (TYPES[k] == IBV_QPT_UD ? IBV_QP_QKEY : 0);

			CODE(EINVAL, ibv_modify_qp(qp, &attr, mask));
			CODE(IBV_QPS_INIT, qp->state);
		}
		CODE(0, ibv_query_qp(qp, &reported, IBV_QP_STATE | IBV_QP_QKEY, &init));
		CODE(IBV_QPS_INIT, reported.qp_state);
		CHECK(TYPES[k] != IBV_QPT_UD || reported.qkey == QKEY);
		CODE(0, ibv_destroy_qp(qp));
	}
}

static void test_refused_sizes(void)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 20, .max_sge = 1 } };
	struct ibv_srq_attr both = { .max_wr = 64, .srq_limit = 1 << 20 }, before, after;
	struct ibv_srq *srq = ibv_create_srq(pd, &init);
	int cqe = cq->cqe;

	NEED(srq && ibv_query_srq(srq, &before) == 0);
	CODE(EINVAL, ibv_modify_srq(srq, &both, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT));
	CODE(0, ibv_query_srq(srq, &after));
	CHECK(!memcmp(&before, &after, sizeof(before)));
	CHECK(ibv_resize_cq(cq, 1 << 30) != 0 && ibv_resize_cq(cq, 0) != 0);
	CODE(cqe, cq->cqe);
	CODE(0, ibv_destroy_srq(srq));
}

/* A refused bind does not change the window's key. Datagram queue pairs do not support windows. */
static void test_refused_binds(char *memory)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, SIZE, LOCAL | IBV_ACCESS_REMOTE_WRITE |
		IBV_ACCESS_MW_BIND);
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	struct ibv_qp *early = create_qp(IBV_QPT_RC, NULL), *datagrams = create_qp(IBV_QPT_UD, NULL);
	struct ibv_mw_bind bind = { .bind_info = { mr, (uintptr_t)memory, 64, IBV_ACCESS_REMOTE_WRITE } };
	uint32_t key;

	NEED(mr && mw);
	key = mw->rkey;
	CODE(EINVAL, ibv_bind_mw(early, mw, &bind));
	CODE(EINVAL, ibv_bind_mw(datagrams, mw, &bind));
	bind.bind_info.mw_access_flags = 1 << 30;
	CODE(EINVAL, ibv_bind_mw(early, mw, &bind));
	CHECK(mw->rkey == key);
	CODE(0, ibv_destroy_qp(early));
	CODE(0, ibv_destroy_qp(datagrams));
	CODE(0, ibv_dealloc_mw(mw));
	CODE(0, ibv_dereg_mr(mr));
}

/* After ibv_rereg_mr, imports and advice apply to the region's new memory. */
static void test_reregistration(void)
{
	int prot = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
	char *old = mmap(NULL, 2 * SIZE, prot, flags, -1, 0), *now = mmap(NULL, SIZE, prot, flags, -1, 0);
	struct ibv_mr *mr = ibv_reg_mr(pd, old, 2 * SIZE, LOCAL | IBV_ACCESS_ON_DEMAND), *imported, saved;
	struct ibv_sge sge = { .length = 64 };

	NEED(old != MAP_FAILED && now != MAP_FAILED && mr);
	saved = *mr;
	CODE(IBV_REREG_MR_ERR_INPUT, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION |
		IBV_REREG_MR_CHANGE_PD, NULL, now, SIZE, 0));
	CODE(IBV_REREG_MR_ERR_INPUT, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION |
		IBV_REREG_MR_CHANGE_ACCESS, NULL, now, SIZE, 2));
	CHECK(!memcmp(&saved, mr, sizeof(saved)));
	CODE(0, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, now, SIZE, 0));
	CHECK(mr->addr == now && mr->length == SIZE);
	NEED(munmap(old, 2 * SIZE) == 0);
	NEED((imported = ibv_import_mr(pd, mr->handle)));
	CHECK(imported->length == SIZE && imported->lkey == mr->lkey && imported->rkey == mr->rkey);
	ibv_unimport_mr(imported);
	sge.addr = (uintptr_t)now;
	sge.lkey = mr->lkey;
	CODE(0, ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1));
	CODE(0, ibv_dereg_mr(mr));
	NEED(munmap(now, SIZE) == 0);
}

/* A poll returns as many completions as requested, in order, independent of the library's internal
 * batch size. */
static void test_poll_counts(void)
{
	static const int COUNTS[] = { 1, 2, 15, 16, 17, 20, 31, 32, 33, MANY };
	struct ibv_wc wc[MANY + 1];
	unsigned i;
	int n, k;

	for (i = 0; i < sizeof(COUNTS) / sizeof(*COUNTS); i++) {
		struct ibv_qp *qp = create_qp(IBV_QPT_RC, NULL);

		for (n = 0; n < MANY; n++) {
			struct ibv_recv_wr wr = { .wr_id = n }, *bad;

			NEED(ibv_post_recv(qp, &wr, &bad) == 0);
		}
		move_to(qp, IBV_QPS_ERR, 0);
		for (n = 0; n < MANY; n += k) {
			int want = COUNTS[i] < MANY - n ? COUNTS[i] : MANY - n;

			memset(wc, 0x5a, sizeof(wc));
			k = ibv_poll_cq(cq, COUNTS[i], wc);
			CODE(want, k);
			NEED(k > 0);
			CHECK(wc[0].wr_id == (uint64_t)n && wc[k - 1].wr_id == (uint64_t)(n + k - 1));
			CHECK(wc[COUNTS[i]].wr_id == 0x5a5a5a5a5a5a5a5aull);
		}
		CODE(0, ibv_destroy_qp(qp));
	}
}

static struct ibv_qp *next_drained(void)
{
	struct ibv_async_event event;

	errno = 0;
	if (ibv_get_async_event(context, &event)) {
		CHECK(errno == EAGAIN);
		return NULL;
	}
	CODE(IBV_EVENT_SQ_DRAINED, event.event_type);
	ibv_ack_async_event(&event);
	return event.element.qp;
}

/* Three queue pairs have one event each, and the test destroys one of them. The library delivers
 * only the events of the two remaining ones. */
static void test_async_events_of_destroyed_qp(void)
{
	int destroyed, i;

	NEED(fcntl(context->async_fd, F_SETFL, fcntl(context->async_fd, F_GETFL) | O_NONBLOCK) == 0);
	for (destroyed = 0; destroyed < 3; destroyed++) {
		struct ibv_qp *qps[3];

		for (i = 0; i < 3; i++) {
			qps[i] = create_qp(IBV_QPT_UD, NULL);
			move_to(qps[i], IBV_QPS_RTR, 0);
			move_to(qps[i], IBV_QPS_RTS, IBV_QP_SQ_PSN);
			move_to(qps[i], IBV_QPS_SQD, IBV_QP_EN_SQD_ASYNC_NOTIFY);
		}
		CODE(0, ibv_destroy_qp(qps[destroyed]));
		for (i = 0; i < 3; i++)
			if (i != destroyed)
				CHECK(next_drained() == qps[i]);
		CHECK(!next_drained());
		for (i = 0; i < 3; i++)
			if (i != destroyed)
				CODE(0, ibv_destroy_qp(qps[i]));
	}
}

static void test_completion_events_of_destroyed_cq(void)
{
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	struct ibv_cq *all[3], *shared = cq, *got;
	int destroyed, i;
	void *own;

	NEED(channel && fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK) == 0);
	for (destroyed = 0; destroyed < 3; destroyed++) {
		for (i = 0; i < 3; i++) {
			struct ibv_recv_wr wr = { 0 }, *bad;
			struct ibv_qp *qp;

			NEED((cq = all[i] = ibv_create_cq(context, MANY, &all[i], channel, 0)));
			NEED(ibv_req_notify_cq(cq, 0) == 0);
			qp = create_qp(IBV_QPT_RC, NULL);
			NEED(ibv_post_recv(qp, &wr, &bad) == 0);
			move_to(qp, IBV_QPS_ERR, 0);
			CODE(0, ibv_destroy_qp(qp));
		}
		CODE(0, ibv_destroy_cq(all[destroyed]));
		for (i = 0; i < 3; i++)
			if (i != destroyed) {
				NEED(ibv_get_cq_event(channel, &got, &own) == 0);
				CHECK(got == all[i] && own == &all[i]);
				ibv_ack_cq_events(got, 1);
				CODE(0, ibv_destroy_cq(got));
			}
		MINUS_ONE(EAGAIN, ibv_get_cq_event(channel, &got, &own));
	}
	cq = shared;
	CODE(0, ibv_destroy_comp_channel(channel));
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	static char memory[SIZE];

	alarm(50);
	NEED(list && list[0] && (context = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	NEED((pd = ibv_alloc_pd(context)) && (cq = ibv_create_cq(context, 2 * MANY, NULL, NULL, 0)));
	test_refused_state_change();
	test_refused_sizes();
	test_refused_binds(memory);
	test_reregistration();
	test_poll_counts();
	test_async_events_of_destroyed_qp();
	test_completion_events_of_destroyed_cq();
	CODE(0, ibv_destroy_cq(cq));
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
	return result();
}
