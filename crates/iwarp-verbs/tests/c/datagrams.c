/* Tests of datagrams: all ways to create address handles, to post and to poll, a shared receive
 * queue, multicast, required attributes of state changes, and errors. */

#include "check.h"
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <poll.h>

#define QKEY 0x22222222u
#define GRH 40

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static unsigned char memory[8][256];

struct end {
	struct ibv_cq *cq;
	struct ibv_qp *qp;
};

static struct ibv_sge sge_of(int slot, unsigned length)
{
	return (struct ibv_sge){ (uintptr_t)memory[slot], length, mr->lkey };
}

static void move_to_rts(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
	struct ibv_qp_init_attr init;
	int full = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;

	CODE(EINVAL, ibv_modify_qp(qp, &attr, full & ~IBV_QP_QKEY));
	CODE(EINVAL, ibv_modify_qp(qp, &attr, full | IBV_QP_AV));
	CODE(0, ibv_modify_qp(qp, &attr, full));
	attr.qp_state = IBV_QPS_RTS;
	CODE(EINVAL, ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
	attr.qp_state = IBV_QPS_RTR;
	CODE(0, ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	attr.sq_psn = 77;
	CODE(EINVAL, ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	CODE(0, ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
	CODE(0, ibv_query_qp(qp, &attr, IBV_QP_QKEY, &init));
	NEED(attr.qp_state == IBV_QPS_RTS && attr.qkey == QKEY && attr.sq_psn == 77);
	NEED(init.qp_type == IBV_QPT_UD && qp->state == IBV_QPS_RTS);
}

static struct ibv_ah *create_handle(const union ibv_gid *gid)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1,
		.grh = { .dgid = *gid, .hop_limit = 1 } };
	struct ibv_ah *ah = ibv_create_ah(pd, &attr);

	NEED(ah);
	return ah;
}

/* Creates address handles with each entry of the GID table. Checks invalid entries, and the source
 * of replies. */
static void create_handles(struct ibv_ah *found[2], const union ibv_gid gids[2])
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1,
		.grh = { .dgid = gids[0], .hop_limit = 1 } };
	struct ibv_wc wc = { .wc_flags = IBV_WC_GRH };
	struct ibv_ah_attr back;
	struct ibv_grh grh = { .version_tclass_flow = htonl(6u << 28), .sgid = gids[1], .dgid = gids[1] };

	attr.grh.sgid_index = 30;
	IS_NULL(EINVAL, ibv_create_ah(pd, &attr));
	attr.grh.sgid_index = 255;
	IS_NULL(EINVAL, ibv_create_ah(pd, &attr));
	attr.grh.sgid_index = 1;
	IS_NULL(EINVAL, ibv_create_ah(pd, &attr));
	attr.grh.dgid = gids[1];
	NEED((found[1] = ibv_create_ah(pd, &attr)));
	CODE(0, ibv_init_ah_from_wc(context, 1, &wc, &grh, &back));
	NEED(back.is_global && back.grh.sgid_index == 1 && !memcmp(&back.grh.dgid, &gids[1], 16));
	grh.dgid.raw[15] ^= 2;
	CODE(-1, ibv_init_ah_from_wc(context, 1, &wc, &grh, &back));
	CODE(EINVAL, errno);
	memset(&grh.dgid, 0, 16);
	grh.dgid.raw[0] = 0xff;
	grh.dgid.raw[1] = 5;
	CODE(0, ibv_init_ah_from_wc(context, 1, &wc, &grh, &back));
	CODE(1, back.grh.sgid_index);
	CODE(-1, ibv_init_ah_from_wc(context, 2, &wc, &grh, &back));

	/* By LID: 1 is the LID of 127.0.0.1. */
	attr = (struct ibv_ah_attr){ .dlid = 1 };
	IS_NULL(EINVAL, ibv_create_ah(pd, &attr));
	attr.port_num = 1;
	NEED((found[0] = ibv_create_ah(pd, &attr)));
	attr.dlid = 0;
	IS_NULL(EINVAL, ibv_create_ah(pd, &attr));
}

static void receive(struct ibv_qp *qp, int slot)
{
	struct ibv_sge sge = sge_of(slot, sizeof memory[slot]);
	struct ibv_recv_wr wr = { .wr_id = slot, .sg_list = &sge, .num_sge = 1 }, *bad;

	CODE(0, qp->srq ? ibv_post_srq_recv(qp->srq, &wr, &bad) : ibv_post_recv(qp, &wr, &bad));
}

/* Returns the service level that mlx5 reports for a RoCE v2 datagram: 8 for its UDP header, plus 1
 * for IPv6 or 2 for IPv4. */
static uint8_t expected_sl(const unsigned char *grh)
{
	return grh[0] >> 4 == 6 ? 9 : 10;
}

static struct ibv_wc next_completion(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	int n;

	do {
		n = ibv_poll_cq(cq, 1, &wc);
	} while (n == 0);
	NEED(n == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(wc.sl == (wc.opcode & IBV_WC_RECV ? expected_sl(memory[wc.wr_id]) : 0));
	return wc;
}

static void send_text(struct ibv_qp *qp, struct ibv_ah *ah, unsigned qpn, const char *text)
{
	struct ibv_sge sge = { (uintptr_t)text, strlen(text), 0 };
	struct ibv_send_wr wr = {
		.wr_id = 9, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = htonl(5),
		.send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED,
		.wr.ud = { .ah = ah, .remote_qpn = qpn, .remote_qkey = QKEY },
	}, *bad;

	CODE(0, ibv_post_send(qp, &wr, &bad));
}

static void test_refused_sends(struct ibv_qp *qp, struct ibv_ah *ah)
{
	struct ibv_sge sge = sge_of(0, 4);
	struct ibv_send_wr first = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND };
	struct ibv_send_wr wr = first, *bad = NULL;
	struct ibv_pd *other = ibv_alloc_pd(context);
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1 };
	struct ibv_ah *foreign;

	first.wr.ud.ah = ah;
	first.wr.ud.remote_qpn = qp->qp_num;
	first.next = &wr;
	CODE(EINVAL, ibv_post_send(qp, &first, &bad));
	NEED(bad == &wr);
	wr.wr.ud = first.wr.ud;
	wr.opcode = IBV_WR_RDMA_WRITE;
	CODE(EINVAL, ibv_post_send(qp, &wr, &bad));
	IS_NULL(EINVAL, ibv_create_ah(pd, &attr));
	NEED(other);
	NEED(ibv_query_gid(context, 1, 0, &attr.grh.dgid) == 0);
	NEED((foreign = ibv_create_ah(other, &attr)));
	wr.opcode = IBV_WR_SEND;
	wr.wr.ud.ah = foreign;
	CODE(EINVAL, ibv_post_send(qp, &wr, &bad));
	CODE(EBUSY, ibv_dealloc_pd(other));
	CODE(0, ibv_destroy_ah(foreign));
	CODE(EINVAL, ibv_destroy_ah(foreign));
	CODE(0, ibv_dealloc_pd(other));
}

/* The plain end uses ibv_post_send, ibv_poll_cq and a shared receive queue. The extended end uses
 * ibv_wr_* and an extended completion queue. */
static struct end plain, extended;
static struct ibv_cq_ex *cq_ex;
static struct ibv_qp_ex *qp_ex;
static struct ibv_srq *srq;

static void create_ends(void)
{
	struct ibv_cq_init_attr_ex cq_attr = { .cqe = 16, .wc_flags = IBV_WC_STANDARD_FLAGS };
	struct ibv_srq_init_attr srq_attr = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_qp_init_attr attr = { .cap = { 4, 4, 1, 1, 64 }, .qp_type = IBV_QPT_UD };
	struct ibv_qp_init_attr_ex ex = { .cap = { 4, 4, 1, 1, 64 }, .qp_type = IBV_QPT_UD };

	NEED((plain.cq = ibv_create_cq(context, 16, NULL, NULL, 0)));
	NEED((srq = ibv_create_srq(pd, &srq_attr)));
	attr.send_cq = attr.recv_cq = plain.cq;
	attr.srq = srq;
	NEED((plain.qp = ibv_create_qp(pd, &attr)));
	NEED((cq_ex = ibv_create_cq_ex(context, &cq_attr)));
	extended.cq = ibv_cq_ex_to_cq(cq_ex);
	ex.send_cq = ex.recv_cq = extended.cq;
	ex.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	ex.pd = pd;
	ex.send_ops_flags = IBV_QP_EX_WITH_RDMA_READ;
	IS_NULL(EOPNOTSUPP, ibv_create_qp_ex(context, &ex));
	ex.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
	NEED((extended.qp = ibv_create_qp_ex(context, &ex)));
	NEED((qp_ex = ibv_qp_to_qp_ex(extended.qp)) && !ibv_qp_to_qp_ex(plain.qp));
	move_to_rts(plain.qp);
	move_to_rts(extended.qp);
}

static void test_exchange(struct ibv_ah *ah)
{
	struct ibv_poll_cq_attr poll = { 0 };
	struct ibv_ah *back;
	struct ibv_wc wc;
	uint8_t level;

	/* The plain end sends, and the extended end polls. */
	receive(extended.qp, 0);
	send_text(plain.qp, ah, extended.qp->qp_num, "there");
	NEED(next_completion(plain.cq).opcode == IBV_WC_SEND);
	while (ibv_start_poll(cq_ex, &poll) == ENOENT)
		;
	NEED(cq_ex->status == IBV_WC_SUCCESS && cq_ex->wr_id == 0);
	NEED(ibv_wc_read_src_qp(cq_ex) == plain.qp->qp_num);
	NEED(ibv_wc_read_wc_flags(cq_ex) == (IBV_WC_GRH | IBV_WC_WITH_IMM));
	NEED(ibv_wc_read_byte_len(cq_ex) == GRH + 5 && ibv_wc_read_vendor_err(cq_ex) == 0);
	NEED(ntohl(ibv_wc_read_imm_data(cq_ex)) == 5);
	wc = (struct ibv_wc){ .wc_flags = IBV_WC_GRH, .src_qp = ibv_wc_read_src_qp(cq_ex) };
	level = ibv_wc_read_sl(cq_ex);
	ibv_end_poll(cq_ex);
	NEED(level == expected_sl(memory[0]));
	NEED(memcmp(memory[0] + GRH, "there", 5) == 0);

	NEED((back = ibv_create_ah_from_wc(pd, &wc, (struct ibv_grh *)memory[0], 1)));
	receive(plain.qp, 1);
	ibv_wr_start(qp_ex);
	qp_ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(qp_ex);
	ibv_wr_set_ud_addr(qp_ex, back, wc.src_qp, QKEY);
	ibv_wr_set_inline_data(qp_ex, "and back", 8);
	CODE(0, ibv_wr_complete(qp_ex));
	wc = next_completion(plain.cq);
	NEED(wc.wr_id == 1 && wc.byte_len == GRH + 8 && wc.src_qp == extended.qp->qp_num &&
		wc.wc_flags == IBV_WC_GRH);
	NEED(memcmp(memory[1] + GRH, "and back", 8) == 0);
	next_completion(extended.cq);
	ibv_wr_start(qp_ex);
	ibv_wr_send(qp_ex);
	CODE(EINVAL, ibv_wr_complete(qp_ex));
	CODE(0, ibv_destroy_ah(back));
}

static void test_source_entries(const union ibv_gid *gid)
{
	struct ibv_ah *of_entry[2];
	union ibv_gid gids[2];
	struct ibv_wc wc;

	/* Send from the first address of the device, selected by LID, and from the second. */
	NEED(ibv_query_gid(context, 1, 1, &gids[1]) == 0);
	gids[0] = *gid;
	create_handles(of_entry, gids);
	for (int i = 0; i < 2; i++) {
		receive(plain.qp, 3 + i);
		ibv_wr_start(qp_ex);
		ibv_wr_send(qp_ex);
		ibv_wr_set_ud_addr(qp_ex, of_entry[i], plain.qp->qp_num, QKEY);
		ibv_wr_set_inline_data(qp_ex, "entry", 5);
		CODE(0, ibv_wr_complete(qp_ex));
		wc = next_completion(plain.cq);
		NEED(wc.wr_id == (unsigned)(3 + i) && wc.byte_len == GRH + 5);
		NEED(i ? !memcmp(memory[4] + 8, &gids[1], 16) : !memcmp(memory[3] + 32, gids[0].raw + 12, 4));
		NEED(memory[3 + i][i ? 0 : 20] >> 4 == (i ? 6 : 4));
		CODE(0, ibv_destroy_ah(of_entry[i]));
	}
}

static void test_multicast(const union ibv_gid *gid)
{
	union ibv_gid group = { .raw = { [10] = 0xff, 0xff, 239, 255, 77, 9 } };
	struct ibv_ah *all;
	struct ibv_wc wc;

	CODE(EINVAL, ibv_attach_mcast(plain.qp, gid, 0));
	CODE(0, ibv_attach_mcast(plain.qp, &group, 0));
	all = create_handle(&group);
	receive(plain.qp, 2);
	ibv_wr_start(qp_ex);
	ibv_wr_send_imm(qp_ex, htonl(6));
	ibv_wr_set_ud_addr(qp_ex, all, 0xffffff, QKEY);
	ibv_wr_set_sge(qp_ex, mr->lkey, (uintptr_t)memory[1], 3);
	CODE(0, ibv_wr_complete(qp_ex));
	wc = next_completion(plain.cq);
	NEED(wc.wr_id == 2 && wc.byte_len == GRH + 3 && ntohl(wc.imm_data) == 6);
	CODE(EBUSY, ibv_destroy_qp(plain.qp));
	/* The failed ibv_destroy_qp has no effect: the queue pair still receives. */
	receive(plain.qp, 2);
	ibv_wr_start(qp_ex);
	ibv_wr_send(qp_ex);
	ibv_wr_set_ud_addr(qp_ex, all, 0xffffff, QKEY);
	ibv_wr_set_inline_data(qp_ex, "busy", 4);
	CODE(0, ibv_wr_complete(qp_ex));
	CODE(GRH + 4, next_completion(plain.cq).byte_len);
	CODE(0, ibv_detach_mcast(plain.qp, &group, 0));
	CODE(EINVAL, ibv_detach_mcast(plain.qp, &group, 0));
	CODE(0, ibv_destroy_ah(all));
}

/* When a queue pair with a shared receive queue moves to ERR, there is an event that it uses no
 * more receives. */
static void test_last_wqe_event(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct pollfd fd = { .fd = context->async_fd, .events = POLLIN };
	struct ibv_async_event event = { 0 };

	CODE(0, ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	NEED(poll(&fd, 1, 20000) == 1 && ibv_get_async_event(context, &event) == 0);
	CODE(IBV_EVENT_QP_LAST_WQE_REACHED, (int)event.event_type);
	CHECK(event.element.qp == qp);
	ibv_ack_async_event(&event);
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_ah *ah;
	union ibv_gid gid;

	NEED(list && list[0] && (context = ibv_open_device(list[0])));
	NEED(ibv_query_gid(context, 1, 0, &gid) == 0 && (pd = ibv_alloc_pd(context)));
	NEED((mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE)));
	create_ends();
	ah = create_handle(&gid);
	test_refused_sends(plain.qp, ah);
	test_exchange(ah);
	test_source_entries(&gid);
	test_multicast(&gid);
	test_last_wqe_event(plain.qp);
	CODE(0, ibv_destroy_ah(ah));
	CODE(EBUSY, ibv_destroy_srq(srq));
	CODE(EBUSY, ibv_destroy_cq(extended.cq));
	CODE(0, ibv_destroy_qp(plain.qp));
	CODE(EINVAL, ibv_destroy_qp(plain.qp));
	CODE(0, ibv_destroy_qp(extended.qp));
	CODE(0, ibv_destroy_srq(srq));
	CODE(0, ibv_destroy_cq(extended.cq));
	CODE(0, ibv_destroy_cq(plain.cq));
	CODE(0, ibv_dereg_mr(mr));
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
	ibv_free_device_list(list);
	return result();
}
