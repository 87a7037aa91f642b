. /tmp/env.sh
echo -15 > /proc/self/autogroup
show() { python -c "
import sys, json
for l in sys.stdin:
    try: d = json.loads(l)
    except ValueError: continue
    print('$1', d['repo'], d['median'], d['min'], 'first', d['first'], 'flt', d['flt'], 'sys', d['stime'], 'anon', d['anon'], 'loss', d['loss'])"; }
for i in 1 2; do
python /tmp/p/step.py /work/main bf16 2 8 2>/dev/null | show plain
MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=67108864 python /tmp/p/step.py /work/main bf16 2 8 2>/dev/null | show notrim
MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=536870912 python /tmp/p/step.py /work/main bf16 2 8 2>/dev/null | show m32t512
MALLOC_MMAP_THRESHOLD_=1048576 THP_MEM_ALLOC_ENABLE=1 python /tmp/p/step.py /work/main bf16 2 8 2>/dev/null | show m1thp
done
