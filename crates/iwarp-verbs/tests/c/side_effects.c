/* Side effects of refused calls, which have none, and of destroying an object, which leaves others
 * intact. */
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

static struct ibv_qp *make(enum ibv_qp_type type, struct ibv_srq *srq)
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

static void to(struct ibv_qp *qp, enum ibv_qp_state state, int mask)
{
	struct ibv_qp_attr attr = { .qp_state = state, .en_sqd_async_notify = 1 };

	NEED(ibv_modify_qp(qp, &attr, IBV_QP_STATE | mask) == 0);
}

/* A refused change of state does not change the public structure either. */
static void states(void)
{
	static const enum ibv_qp_state WRONG[] = { IBV_QPS_SQD, IBV_QPS_SQE, IBV_QPS_UNKNOWN };
	static const enum ibv_qp_type TYPES[] = { IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD };
	struct ibv_qp_init_attr init;
	unsigned i, k;

	for (k = 0; k < sizeof(TYPES) / sizeof(*TYPES); k++) {
		struct ibv_qp *qp = make(TYPES[k], NULL);
		struct ibv_qp_attr told;

		for (i = 0; i < sizeof(WRONG) / sizeof(*WRONG); i++) {
			struct ibv_qp_attr attr = { .qp_state = WRONG[i], .qkey = QKEY + 1 };
			int mask = IBV_QP_STATE | (TYPES[k] == IBV_QPT_UD ? IBV_QP_QKEY : 0);

			CODE(EINVAL, ibv_modify_qp(qp, &attr, mask));
			CODE(IBV_QPS_INIT, qp->state);
		}
		CODE(0, ibv_query_qp(qp, &told, IBV_QP_STATE | IBV_QP_QKEY, &init));
		CODE(IBV_QPS_INIT, told.qp_state);
		CHECK(TYPES[k] != IBV_QPT_UD || told.qkey == QKEY);
		CODE(0, ibv_destroy_qp(qp));
	}
}

static void sizes(void)
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

/* A bind that was not posted does not change the window's key. Datagrams have no windows. */
static void windows(char *memory)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, SIZE, LOCAL | IBV_ACCESS_REMOTE_WRITE |
		IBV_ACCESS_MW_BIND);
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	struct ibv_qp *early = make(IBV_QPT_RC, NULL), *datagrams = make(IBV_QPT_UD, NULL);
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

/* After re-registration, imports and advice apply to the new region. */
static void regions(void)
{
	int prot = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
	char *old = mmap(NULL, 2 * SIZE, prot, flags, -1, 0), *now = mmap(NULL, SIZE, prot, flags, -1, 0);
	struct ibv_mr *mr = ibv_reg_mr(pd, old, 2 * SIZE, LOCAL | IBV_ACCESS_ON_DEMAND), *imported, was;
	struct ibv_sge sge = { .length = 64 };

	NEED(old != MAP_FAILED && now != MAP_FAILED && mr);
	was = *mr;
	CODE(IBV_REREG_MR_ERR_INPUT, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION |
		IBV_REREG_MR_CHANGE_PD, NULL, now, SIZE, 0));
	CODE(IBV_REREG_MR_ERR_INPUT, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION |
		IBV_REREG_MR_CHANGE_ACCESS, NULL, now, SIZE, 2));
	CHECK(!memcmp(&was, mr, sizeof(was)));
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

/* A poll returns as many completions as requested, in order, however many the library takes at a
 * time. */
static void polls(void)
{
	static const int COUNTS[] = { 1, 2, 15, 16, 17, 20, 31, 32, 33, MANY };
	struct ibv_wc wc[MANY + 1];
	unsigned i;
	int n, k;

	for (i = 0; i < sizeof(COUNTS) / sizeof(*COUNTS); i++) {
		struct ibv_qp *qp = make(IBV_QPT_RC, NULL);

		for (n = 0; n < MANY; n++) {
			struct ibv_recv_wr wr = { .wr_id = n }, *bad;

			NEED(ibv_post_recv(qp, &wr, &bad) == 0);
		}
		to(qp, IBV_QPS_ERR, 0);
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

/* Three queue pairs have an event each, and one is destroyed: the others' events are delivered
 * once, and its own is not. */
static void asynchronous_events(void)
{
	int gone, i;

	NEED(fcntl(context->async_fd, F_SETFL, fcntl(context->async_fd, F_GETFL) | O_NONBLOCK) == 0);
	for (gone = 0; gone < 3; gone++) {
		struct ibv_qp *qps[3];

		for (i = 0; i < 3; i++) {
			qps[i] = make(IBV_QPT_UD, NULL);
			to(qps[i], IBV_QPS_RTR, 0);
			to(qps[i], IBV_QPS_RTS, IBV_QP_SQ_PSN);
			to(qps[i], IBV_QPS_SQD, IBV_QP_EN_SQD_ASYNC_NOTIFY);
		}
		CODE(0, ibv_destroy_qp(qps[gone]));
		for (i = 0; i < 3; i++)
			if (i != gone)
				CHECK(next_drained() == qps[i]);
		CHECK(!next_drained());
		for (i = 0; i < 3; i++)
			if (i != gone)
				CODE(0, ibv_destroy_qp(qps[i]));
	}
}

static void completion_events(void)
{
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	struct ibv_cq *all[3], *shared = cq, *got;
	int gone, i;
	void *own;

	NEED(channel && fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK) == 0);
	for (gone = 0; gone < 3; gone++) {
		for (i = 0; i < 3; i++) {
			struct ibv_recv_wr wr = { 0 }, *bad;
			struct ibv_qp *qp;

			NEED((cq = all[i] = ibv_create_cq(context, MANY, &all[i], channel, 0)));
			NEED(ibv_req_notify_cq(cq, 0) == 0);
			qp = make(IBV_QPT_RC, NULL);
			NEED(ibv_post_recv(qp, &wr, &bad) == 0);
			to(qp, IBV_QPS_ERR, 0);
			CODE(0, ibv_destroy_qp(qp));
		}
		CODE(0, ibv_destroy_cq(all[gone]));
		for (i = 0; i < 3; i++)
			if (i != gone) {
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
	states();
	sizes();
	windows(memory);
	regions();
	polls();
	asynchronous_events();
	completion_events();
	CODE(0, ibv_destroy_cq(cq));
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
	return result();
}
