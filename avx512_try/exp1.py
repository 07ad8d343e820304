import os, sys, time, tempfile, subprocess
os.environ["SECATEUR_CACHE"]=tempfile.mkdtemp()
import torch, llvmlite, llvmlite.binding as llvm
import torch.nn.functional as F
T0=time.time()
import secateur
from secateur.execute import tiled as ft, pairs as fp, Compressed
from secateur.execute.native import build, tiled as nt
from secateur.execute.formats import FORMATS
torch.manual_seed(0)
ONLY=sys.argv[1:] 
SMALL="--small" in ONLY
def sh(c): print(subprocess.run(c,shell=True,capture_output=True,text=True).stdout.strip(),flush=True)
print("secateur",secateur.__file__,"torch",torch.__version__,"llvmlite",llvmlite.__version__,llvm.llvm_version_info,"python",sys.version.split()[0])
name,feat=build.target(); print("cpu",name); print("avx512:",sorted(f for f in feat if "512" in f or "amx" in f or f in("bmi2","f16c","fma")))
sh("lscpu | grep -iE 'model name|MHz|cache|^CPU\\(s\\)|thread'"); sh("nproc; cat /proc/loadavg")
def timed(runs, rounds, cold=None):
    best={k:1e9 for k in runs}
    ks=list(runs)
    for k in ks: runs[k]()
    for r in range(rounds):
        for i in range(len(ks)):
            k=ks[(i+r)%len(ks)]
            if cold is not None: cold.sum()
            s=time.thread_time(); runs[k](); t=time.thread_time()-s
            if t<best[k]: best[k]=t
    return best
def show(title,best,dense="dense"):
    d=best[dense]
    print(f"[{time.time()-T0:.0f}s] {title}: dense {d*1e6:.0f}us | "+"; ".join(f"{k} {t*1e6:.0f} {d/t:.2f}x" for k,t in best.items() if k!=dense),flush=True)
KERNELS={}
def kernel(*opts, mode=()):
    key=(opts,tuple(sorted(mode)))
    if key not in KERNELS:
        nt.MODE=set(mode); os.environ["SECATEUR_CACHE"]=tempfile.mkdtemp(); build.kernel.cache_clear()
        KERNELS[key]=build.kernel(*opts); nt.MODE=set()
    return KERNELS[key]
def runner(x, buffers, rows, height, tile, G, mode=(), seen="float32", stored="float32", width=192):
    batch, columns=x.shape
    columns*=3 if seen=="six" else 1
    k=kernel("tiled.multiply_rows",height,tile,seen,stored,mode=mode)
    shape=(columns,width,-(-columns//width),rows//height,256//height)
    room=(columns+256)*tile*G
    bias=torch.zeros(rows)
    def f():
        memory, y = ft.scratch(room), x.new_empty((batch,rows),dtype=torch.float32)
        stride=x.stride(0)
        build.run(k,(*shape,*ft._places(buffers),bias.data_ptr(),x.data_ptr(),stride*x.element_size(),memory.data_ptr(),room*4,G,1,y.data_ptr(),batch,rows),1)
        return y
    return f
def pack(m,h,width=192):
    ft.WIDTH=width
    try: return ft.TILED.pack(m,(h,))
    finally: ft.WIDTH=192
def pruned(w,s,h=1,v=1):
    keep=torch.rand(w.shape[0]//h,w.shape[1]//v)>=s
    return w*keep.repeat_interleave(h,0).repeat_interleave(v,1)
def check(name,y,ref,tol=1e-3):
    e=((y.float()-ref).abs().max()/ref.abs().max()).item()
    if not e<tol: print("  WRONG",name,e)
def threads(n): torch.set_num_threads(n)

with torch.no_grad():
    # ---- linear float32
    V1=[(64,1,(),192),(32,1,(),192),(32,2,(),192),(32,4,(),192),(32,2,("noquad",),192),(32,2,("mixed",),192),(32,2,("lea",),192),(32,2,("mixed","lea"),192),(16,4,(),192),(64,1,(),96),(64,1,("mixed",),96),(64,1,("mixed","lea"),96),(64,1,("noquad",),96)]
    for size,rows,sp in [(768,64,.8),(768,64,.9),(768,64,.95),(768,256,.8),(768,256,.9),(4096,64,.8),(4096,64,.9),(4096,64,.95),(4096,256,.8),(4096,256,.9)]:
        if SMALL and size==4096 and rows==256: continue
        threads(8); W=pruned(torch.randn(size,size)/size**.5,sp); x=torch.randn(rows,size)
        B={w:pack(W,1,w) for w in (192,96)}; Z=pack(W*0,1); threads(1)
        runs={"dense":lambda:F.linear(x,W)}
        for t,g,m,w in V1: runs[f"t{t}g{g}{'w96' if w==96 else ''}{'+'+'+'.join(m) if m else ''}"]=runner(x,B[w],size,1,t,g,m,width=w)
        runs["empty t32g2"]=runner(x,Z,size,1,32,2); runs["empty t64g1"]=runner(x,Z,size,1,64,1)
        ref=F.linear(x,W)
        for k,f in runs.items():
            if not k.startswith("empty"): check(k,f(),ref)
        show(f"linear {sp:.0%} {rows} rows {size}",timed(runs,60 if size==768 else 12 if rows==64 else 6))
    # ---- height 4
    for h,sp in ((4,.8),(4,.9),(16,.9)):
        threads(8); W=pruned(torch.randn(4096,4096)/64,sp,h); x=torch.randn(64,4096); B=pack(W,4); B96=pack(W,4,96); B1=pack(W,1); threads(1)
        runs={"dense":lambda:F.linear(x,W)}
        for t,g,m in [(16,1,()),(16,2,()),(16,4,()),(32,1,()),(32,2,()),(32,2,("lea",)),(64,1,())]: runs[f"h4 t{t}g{g}{'+lea' if m else ''}"]=runner(x,B,4096,4,t,g,m)
        runs["h4 w96 t64g1"]=runner(x,B96,4096,4,64,1,width=96)
        runs["h1 t32g2"]=runner(x,B1,4096,1,32,2)
        ref=F.linear(x,W)
        for k,f in runs.items(): check(k,f(),ref)
        show(f"{h}x1 {sp:.0%} 64 rows 4096",timed(runs,12))
    # ---- pairs
    if build.has("avx512bf16") or SMALL:
        for nm in ("16x16 80%","2:4"):
            threads(8); W=torch.randn(4096,4096)/64
            if nm=="2:4":
                gr=W.abs().view(4096,-1,4); W=W*(gr.argsort(-1).argsort(-1)>=2).view_as(W)
            else: W=pruned(W,.8,16,16)
            W=W.bfloat16(); x=torch.randn(64,4096).bfloat16(); xs=x.view(torch.int32).view(torch.float32)
            W32,x32=W.float(),x.float(); threads(1)
            runs={"dense":lambda:F.linear(x,W),"fp32":lambda:F.linear(x32,W32)}
            P=FORMATS["pairs"]; threads(8)
            for o in ([(1,1)] if nm=="2:4" else [(1,0),(4,0)]):
                B=P.pack(W,o)
                for t,g in ((16,2),(32,1),(32,2),(64,1)): runs[f"pairs{o} t{t}g{g}"]=runner(xs,B,4096,o[0],t,g,seen="six" if o[1] else "float32",stored="pair")
            for h in ((1,) if nm=="2:4" else (1,4)):
                Bt=pack(W,h)
                for t,g in ((32,2),(16,2)): runs[f"tiled{h} t{t}g{g}"]=runner(x,Bt,4096,h,t,g,seen="bfloat16",stored="bfloat16")
            threads(1); y=runs["fp32"]()
            for k,f in runs.items(): check(k,f(),y,2e-2)
            from secateur.execute.find import zeros_of
            from secateur.execute.formats import Use
            print("  pairs fits:",list(P.fits(W,zeros_of(W),Use("linear","cpu",(64,)))))
            e=torch.zeros(64,4096); runs["y.to(bf16)"]=lambda:e.to(torch.bfloat16)
            show(f"bf16 {nm}",timed(runs,10 if not SMALL else 2))
    # ---- conv
    for sp in (.8,.9):
        for ch,sz in ((64,56),(128,28),(256,14)):
            conv=torch.nn.Conv2d(ch,ch,3,padding=1,bias=False); conv.weight.copy_(pruned(conv.weight.flatten(1),sp).view_as(conv.weight)); x=torch.randn(1,ch,sz,sz)
            B=pack(conv.weight.flatten(1),1); Z=pack(conv.weight.flatten(1)*0,1)
            runs={"dense":lambda:conv(x)}
            win=ft.Window((3,3),(1,1),(1,1),(1,1))
            def cr(bufs,t):
                def f():
                    ft._tile_of=lambda *a,**k:t
                    return ft._conv(x,bufs,None,ch,(1,),win)
                def g():  # plan fixed
                    return None
                ft._planes_plan.cache_clear(); f()
                plan=ft._planes_plan(tuple(x.shape),ch,1,"float32",1,win)
                def h():
                    multiply,out,matrix,room,image,work,padding=plan
                    mem=ft.scratch(image+room).data_ptr(); y=x.new_empty((1,ch,*out)); b=ft.no_bias(ch)
                    build.run_in_steps(multiply,(*matrix,*ft._places(bufs),b.data_ptr(),mem,mem+image*4,room*4,y.data_ptr(),*work,x.data_ptr(),*padding),1)
                    return y
                return h
            for t in (16,32,64): runs[f"t{t}"]=cr(B,t)
            for t in (32,64): runs[f"empty t{t}"]=cr(Z,t)
            ref=conv(x)
            for k,f in runs.items():
                if "empty" not in k: check(k,f(),ref)
            show(f"conv {sp:.0%} {ch}ch {sz}",timed(runs,60))
    # ---- one row, cold
    flush=torch.ones(48<<20 if not SMALL else 12<<20)
    for sp in (.5,.8,.9,.95):
        threads(8); lin=torch.nn.Linear(4096,4096,bias=False); lin.weight.copy_(pruned(lin.weight,sp)); x=torch.randn(1,4096)
        runs={"dense":lambda:lin(x)}
        for form in ("bitmask","gather"):
            for store in (None,torch.bfloat16):
                if form=="gather" and sp==.5: continue
                c=Compressed(lin,FORMATS[form],(),store=store).eval(); runs[f"{form}{' bf16' if store else ''}"]=lambda c=c:c(x)
        threads(1)
        if sp<.95 and build.has("avx512vbmi2"):
            cur=build.target(); build.kernel.cache_clear(); old=build.target
            build.target=lambda:(cur[0],cur[1]-{"avx512vbmi2"})
            kk=build.kernel("single.bitmask","bfloat16"); build.target=old; build.kernel.cache_clear()
            from secateur.execute import single as fs
            W=lin.weight.bfloat16(); vals,masks,starts=fs.BITMASK.pack(W,()); table=fs._table("bfloat16")
            def oldbm():
                return fs._by_rows(x,None,4096,lambda seen,b,y: build.run(kk,[seen,4096,masks.shape[1],starts.data_ptr(),masks.data_ptr(),vals.data_ptr(),table.data_ptr(),b,y],1))
            runs["bitmask bf16 by table"]=oldbm
        ref=lin(x)
        for k,f in runs.items(): check(k,f(),ref,2e-2)
        show(f"one row cold {sp:.0%}",timed(runs,25 if not SMALL else 4,flush))
        show(f"one row WARM {sp:.0%}",timed(runs,15 if not SMALL else 4))
print(f"total {time.time()-T0:.0f}s")
